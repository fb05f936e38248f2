"""Peers that are installed beside the environment, by `make bench-peers`: each in a process of its own, on our core.

What a peer brings stays in torch once it is loaded, and nothing else is to be changed.  So its process has the same
torch, loads the peer's compiled code alone, makes its own random inputs of the sizes that it is told, holds what it
computes against the formula, and then calls it as often as it is asked to and says how long that took: its turns stand
between ours.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from attrs import define

from mla_fx.dtypes import DTYPES

#: Where they are installed.
PEERS = Path(sys.prefix) / "share" / "mla_fx" / "peers"
LATENT, ROPE, SCALE = 512, 64, 192**-0.5
ROOM = 256  # tokens that an engine may come to generate
#: By the name of a peer's column, the folder that it is installed in.
FOLDERS = {"zentorch": "zentorch", "vLLM": "vllm"}


def installed() -> list[str]:
    """The names of peers that there are."""
    return [name for name, folder in FOLDERS.items() if (PEERS / folder).is_dir()]


@define(eq=False)
class Apart:
    """A function in another process, which times itself: `seconds(calls)` is what a call took on its clock.

    A peer has one process, since starting one takes longer than most measurements; it has the function of one `sizes`
    at a time, and makes it when it is first asked for.  The engine's ends with its point: it holds gigabytes.
    """

    peer: str
    sizes: dict[str, Any]
    own: Any = None  # a process for this function alone

    def seconds(self, calls: int) -> float:
        """Of one of so many calls; raises `RuntimeError` where the process has ended."""
        process = self.own or started(self.peer, torch.get_num_threads())
        with suppress(BrokenPipeError):
            print(json.dumps({"calls": calls, "sizes": self.sizes}), file=process.stdin, flush=True)
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"{self.peer}: its process ended with {process.wait()}")
        return float(said)

    def __call__(self) -> None:
        self.seconds(1)

    def __del__(self) -> None:
        if self.own:
            self.own.stdin.close()  # at which it ends
            self.own.wait()


def start(peer: str, threads: int) -> Any:
    """A process of a peer, which ends when this one does."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.apart", peer, str(threads)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


#: The one process of a peer.
started = cache(start)


def attention(peer: str, heads: int, lengths: Sequence[int], dtype: str) -> Apart:
    """One new token of each request over so many keys."""
    return Apart(peer, {"heads": heads, "lengths": [*lengths], "dtype": dtype})


def engine(directory: Path, dtype: str, requests: int, length: int, first: Sequence[tuple[int, float]]) -> Apart:
    """A decode step of vLLM's engine over a checkpoint, behind `drawn` tokens of each request.

    `first`: of each request, the token that is likeliest behind them, and its log-probability.
    """
    sizes = {"directory": str(directory), "dtype": dtype, "requests": requests, "length": length, "first": [*first]}
    return Apart("vLLM engine", sizes, own=start("vLLM engine", torch.get_num_threads()))


def drawn(vocabulary: int, requests: int, length: int) -> torch.Tensor:
    """Tokens [requests, length], the same in every process."""
    return torch.randint(vocabulary, (requests, length), generator=torch.Generator().manual_seed(length))


def zentorch(heads: int, lengths: Sequence[int], dtype: str) -> Callable[[], None]:
    """AMD's attention, with heads as rows; values are the keys, of which latents count."""
    torch.ops.load_library(PEERS / "zentorch" / "libzentorch.so")
    kernel, draw = torch.ops.zentorch.zentorch_sdpa, torch.Generator().manual_seed(0)
    q, *keys = (torch.randn(1, 1, rows, LATENT + ROPE, generator=draw).to(DTYPES[dtype]) for rows in (heads, *lengths))

    def call() -> None:
        for k in keys:
            kernel(q, k, k, scale=SCALE)

    for k in keys:
        right(kernel(q, k, k, scale=SCALE)[0][0, 0, :, :LATENT], q[0, 0], k[0, 0], "zentorch")
    return call


def vllm(heads: int, lengths: Sequence[int], dtype: str) -> Callable[[], None]:
    """vLLM's decode attention for MLA over a paged cache, which it has in blocks of 16 alone; all requests in one call.

    Its compiled code is loaded by itself, the library that its own import would choose for this processor.  What it has
    for AMX is another operator, which isn't called.
    """
    library = {(True, True): "_C", (True, False): "_C_AVX512"}.get(
        (torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported()), "_C_AVX2"
    )
    torch.ops.load_library(PEERS / "vllm" / f"{library}.abi3.so")
    kernel, draw, block = torch.ops._C.mla_decode_kvcache, torch.Generator().manual_seed(0), 16
    need = [-(-keys // block) for keys in lengths]
    cache = torch.randn(sum(need), block, LATENT + ROPE, generator=draw).to(DTYPES[dtype])
    q = torch.randn(len(lengths), heads, LATENT + ROPE, generator=draw).to(DTYPES[dtype])
    out = torch.empty(len(lengths), heads, LATENT, dtype=DTYPES[dtype])
    table = torch.nn.utils.rnn.pad_sequence([*torch.arange(sum(need), dtype=torch.int32).split(need)], batch_first=True)
    keys = torch.tensor(lengths, dtype=torch.int32)

    def call() -> None:
        kernel(out, q, cache, SCALE, table, keys)

    call()
    for b, length in enumerate(lengths):
        right(out[b], q[b], cache[table[b].long()].flatten(0, 1)[:length], "vLLM")
    return call


def vllm_engine(directory: str, dtype: str, requests: int, length: int, first: list[Any]) -> Callable[[], None]:
    """A step of vLLM's engine, in its own scheduler and with its sampling: a token more of each request.

    The history grows by a token at each, of which there is room for `ROOM`.  Of its operators the one that rotates is
    left to its form in torch: the compiled one of 0.32 turns queries that lie beside other features wrongly.
    """
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    sys.path.append(str(PEERS))
    from vllm import LLM, SamplingParams

    known = {"fp32": "float32", "bf16": "bfloat16"}
    sizes = {"max_model_len": length + ROOM, "max_num_batched_tokens": requests * (length + ROOM)}
    plain: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
    plain["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    llm = LLM(model=directory, dtype=known[dtype], max_num_seqs=requests, **sizes, **plain).llm_engine
    wanted = SamplingParams(max_tokens=ROOM, temperature=0, ignore_eos=True, detokenize=False, logprobs=5)
    vocabulary = llm.model_config.get_vocab_size()
    for b, prompt in enumerate(drawn(vocabulary, requests, length).tolist()):
        llm.add_request(str(b), {"prompt_token_ids": prompt}, wanted)
    said: dict[str, Any] = {}
    while len(said) < requests:
        said |= {one.request_id: one.outputs[0].logprobs[0] for one in llm.step()}
    for b, (token, logprob) in enumerate(first):
        found = said[str(b)]
        assert token in found and abs(found[token].logprob - logprob) <= 0.05, f"vLLM computes something else: {found}"

    def call() -> None:
        if len(llm.step()) != requests:
            raise RuntimeError(f"a request has come to its end, at {ROOM} tokens")

    return call


def right(found: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, peer: str) -> None:
    """Hold what a peer computes, [H, L], of queries [H, L + R] and keys [n, L + R], against the formula in float64."""
    wide = keys.double()
    want = torch.softmax(q.double() @ wide.mT * SCALE, -1) @ wide[:, :LATENT]
    assert (found.double() - want).abs().max() <= 0.05 * want.abs().max(), f"{peer} computes something else"


def main() -> None:
    """Answer each number of calls of a function with the seconds of one."""
    peer, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a peer prints
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks is told, and ends this by closing the pipe
    clock = time.thread_time if threads == 1 else time.perf_counter
    make = {"zentorch": zentorch, "vLLM": vllm, "vLLM engine": vllm_engine}[peer]
    has, call = None, None
    with torch.no_grad():
        for asked in map(json.loads, sys.stdin):
            if asked["sizes"] != has:
                call = None  # before the next is made
                has, call = asked["sizes"], make(**asked["sizes"])
            start = clock()
            for _ in range(asked["calls"]):
                call()
            print((clock() - start) / asked["calls"], file=answers, flush=True)


if __name__ == "__main__":
    main()
