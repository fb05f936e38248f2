"""What each rank reads: its own part, in the model's dtype or in 8 bits; put together it is the file again.

The right answers come from the tensors of the file and from the layouts that
`mla_fx.parameters` and `mla_fx.models.parameters` document, element by element.
"""

import itertools
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mla_fx import MlaConfig, StepShape
from mla_fx.config import MoeConfig
from mla_fx.dtypes import DTYPES
from mla_fx.effects import Aval, InputError
from mla_fx.models import Checkpoint, CheckpointError, Loader, ModelConfig, write_checkpoint
from mla_fx.models.quantize import quantize_int8
from mla_fx.models.weights import expected, model_avals, mtp_avals
from mla_fx.parameters import Quantized, QueryLora
from tests.cases import mostly_soak, pairwise

leaves = torch.utils._pytree.tree_leaves

#: Even sizes are divided by 1, 2 and 4 ranks.
EVEN = ModelConfig(
    attention=MlaConfig(
        hidden_size=24,
        num_attention_heads=4,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
    ),
    moe=MoeConfig(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1, n_group=2, topk_group=1
    ),
    num_hidden_layers=2,
    vocab_size=16,
    intermediate_size=12,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
)
#: 3 ranks divide the heads and nothing else: rank 2 has no expert, and fewer columns and rows than the others.
ODD = evolve(
    EVEN,
    attention=evolve(EVEN.attention, num_attention_heads=6, hidden_size=20),
    moe=evolve(EVEN.moe, n_routed_experts=4, moe_intermediate_size=5, n_shared_experts=2),
    intermediate_size=10,
)
#: 6 ranks: the last ones have nothing of 4 experts, of 4 columns and of 5 tokens.
FEW = evolve(
    ODD, vocab_size=5, intermediate_size=4, moe=evolve(ODD.moe, moe_intermediate_size=2), num_nextn_predict_layers=1
)
V2 = evolve(
    EVEN,
    model_type="deepseek_v2",
    attention=evolve(EVEN.attention, q_lora_rank=None),
    moe=evolve(
        EVEN.moe,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        n_shared_experts=0,
    ),
)
CASES = {
    "even 1": (EVEN, 1),
    "even 2": (EVEN, 2),
    "even 4": (EVEN, 4),
    "odd 2": (ODD, 2),
    "odd 3": (ODD, 3),
    "few 6": (FEW, 6),
    "V2 2": (V2, 2),
    "tied 3": (evolve(ODD, tie_word_embeddings=True), 3),
    "dense 3": (evolve(ODD, moe=None), 3),
}


def written(directory: Path, config: ModelConfig, **arguments) -> dict[str, torch.Tensor]:
    """The tensors of a fresh checkpoint; with embedding and head of the prediction layer's own."""
    write_checkpoint(directory, config, **arguments)
    tensors = load_file(directory / "model.safetensors")
    for k, name in enumerate(("embed_tokens", "shared_head.head")):
        table = torch.randn(config.vocab_size, config.attention.hidden_size, generator=torch.manual_seed(k))
        tensors[f"model.layers.{config.num_hidden_layers}.{name}.weight"] = table.to(tensors["model.norm.weight"].dtype)
    save_file(tensors, directory / "model.safetensors")
    return tensors


def loaders(directory: Path, ranks: int, **arguments) -> list[Loader]:
    checkpoint = Checkpoint.open(directory)
    return [
        Loader(checkpoint=checkpoint, rank=r, ranks=ranks, **{"dtype": torch.float32, **arguments})
        for r in range(ranks)
    ]


def together(parts: list[torch.Tensor], total: int, dim: int = 0) -> torch.Tensor:
    """The ranks' parts, equal shares of a sum rounded up, one after the other; what pads the last ones is zero."""
    whole = torch.cat(parts, dim)
    padding = whole.narrow(dim, total, whole.shape[dim] - total)
    assert whole.shape[dim] == len(parts) * -(-total // len(parts)) and not padding.any()
    return whole.narrow(dim, 0, total)


class Whole:
    """The ranks' parameters put together again and held against the tensors of the file."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: ModelConfig, *, replicate_query: bool = False):
        self.tensors, self.config, self.replicate_query = tensors, config, replicate_query
        self.used: set[str] = set()

    def same(self, found: torch.Tensor, name: str) -> None:
        self.used.add(name)
        assert torch.equal(found, self.tensors[name].to(found.dtype)), name

    def alike(self, found: list[torch.Tensor], name: str) -> None:
        for each in found:
            self.same(each, name)

    def rows(self, found: list[torch.Tensor], name: str) -> None:
        self.same(together(found, self.tensors[name].shape[0]), name)

    def model(self, ranks) -> None:
        self.rows([rank.embed_tokens for rank in ranks], "model.embed_tokens.weight")
        self.alike([rank.norm for rank in ranks], "model.norm.weight")
        tied = self.config.tie_word_embeddings
        self.rows([rank.lm_head for rank in ranks], "model.embed_tokens.weight" if tied else "lm_head.weight")
        for layer in range(self.config.num_hidden_layers):
            self.layer([rank.layers[layer] for rank in ranks], layer)

    def mtp(self, ranks) -> None:
        layer = self.config.num_hidden_layers
        prefix, hidden = f"model.layers.{layer}.", self.config.attention.hidden_size
        self.rows([rank.embed_tokens for rank in ranks], f"{prefix}embed_tokens.weight")
        self.rows([rank.lm_head for rank in ranks], f"{prefix}shared_head.head.weight")
        self.alike([rank.enorm for rank in ranks], f"{prefix}enorm.weight")
        self.alike([rank.hnorm for rank in ranks], f"{prefix}hnorm.weight")
        self.alike([rank.norm for rank in ranks], f"{prefix}shared_head.norm.weight")
        halves = [together([rank.eh_proj[k] for rank in ranks], hidden) for k in (0, 1)]
        self.same(torch.cat(halves, 1), f"{prefix}eh_proj.weight")
        self.layer([rank.layer for rank in ranks], layer)

    def layer(self, ranks, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.alike([rank.input_layernorm for rank in ranks], f"{prefix}input_layernorm.weight")
        self.alike([rank.post_attention_layernorm for rank in ranks], f"{prefix}post_attention_layernorm.weight")
        self.attention([rank.attention for rank in ranks], f"{prefix}self_attn.")
        networks = [rank.feed_forward for rank in ranks]
        if layer == 0 or self.config.moe is None:
            self.mlp(networks, f"{prefix}mlp.", self.config.intermediate_size)
        else:
            self.moe(networks, f"{prefix}mlp.")

    def attention(self, ranks, prefix: str) -> None:
        c = self.config.attention

        def heads(parts: list[torch.Tensor], replicated: bool = False) -> torch.Tensor:
            if not (replicated and self.replicate_query):
                return torch.cat(parts)
            assert all(torch.equal(part, parts[0]) for part in parts)
            return parts[0]

        if c.q_lora_rank is None:
            self.same(heads([rank.query.q_proj for rank in ranks], True), f"{prefix}q_proj.weight")
        else:
            assert all(isinstance(rank.query, QueryLora) for rank in ranks)
            self.alike([rank.query.q_a_proj for rank in ranks], f"{prefix}q_a_proj.weight")
            self.alike([rank.query.q_a_layernorm for rank in ranks], f"{prefix}q_a_layernorm.weight")
            self.same(heads([rank.query.q_b_proj for rank in ranks], True), f"{prefix}q_b_proj.weight")
        self.alike([rank.kv_a_proj for rank in ranks], f"{prefix}kv_a_proj_with_mqa.weight")
        self.alike([rank.kv_a_layernorm for rank in ranks], f"{prefix}kv_a_layernorm.weight")
        w_uk, w_uv = heads([rank.w_uk for rank in ranks], True), heads([rank.w_uv for rank in ranks])
        kv_b = torch.cat([w_uk, w_uv.transpose(1, 2)], 1).reshape(-1, c.kv_lora_rank)
        self.same(kv_b, f"{prefix}kv_b_proj.weight")
        self.same(torch.cat([rank.o_proj for rank in ranks], 1), f"{prefix}o_proj.weight")

    def mlp(self, ranks, prefix: str, width: int) -> None:
        gate, up = zip(*(rank.gate_up_proj.chunk(2) for rank in ranks), strict=True)
        self.same(together(list(gate), width), f"{prefix}gate_proj.weight")
        self.same(together(list(up), width), f"{prefix}up_proj.weight")
        self.same(together([rank.down_proj for rank in ranks], width, 1), f"{prefix}down_proj.weight")

    def moe(self, ranks, prefix: str) -> None:
        moe = self.config.moe
        self.alike([rank.gate for rank in ranks], f"{prefix}gate.weight")
        for rank in ranks:
            if moe.topk_method == "noaux_tc":
                self.same(rank.e_score_correction_bias, f"{prefix}gate.e_score_correction_bias")
            else:
                assert torch.equal(rank.e_score_correction_bias, torch.zeros(moe.n_routed_experts))
        gate_up = together([rank.gate_up_proj for rank in ranks], moe.n_routed_experts)
        down = together([rank.down_proj for rank in ranks], moe.n_routed_experts)
        for expert in range(moe.n_routed_experts):
            gate, up = gate_up[expert].chunk(2)
            self.same(gate, f"{prefix}experts.{expert}.gate_proj.weight")
            self.same(up, f"{prefix}experts.{expert}.up_proj.weight")
            self.same(down[expert], f"{prefix}experts.{expert}.down_proj.weight")
        shared = [rank.shared_experts for rank in ranks]
        if moe.n_shared_experts:
            self.mlp(shared, f"{prefix}shared_experts.", moe.n_shared_experts * moe.moe_intermediate_size)
        else:
            assert all(each == () for each in shared)


@pytest.mark.parametrize("replicate_query", [False, True], ids=["own", "replicated"])
@pytest.mark.parametrize("case", CASES)
def test_the_ranks_parts_are_the_file(case, replicate_query, tmp_path):
    config, ranks = CASES[case]
    tensors = written(tmp_path, config)
    whole = Whole(tensors, config, replicate_query=replicate_query)
    each = loaders(tmp_path, ranks, replicate_query=replicate_query)
    models = [loader.model() for loader in each]
    whole.model(models)
    assert whole.used == set(expected(config))
    whole.mtp([loader.mtp(model) for loader, model in zip(each, models, strict=True)])
    assert whole.used == set(tensors)
    for leaf in leaves(models):
        assert leaf.is_contiguous()
        assert leaf.untyped_storage().nbytes() == leaf.nbytes, "a view keeps alive what the rank does not need"


def test_a_prediction_module_shares_embedding_and_head_that_it_has_not(tmp_path):
    write_checkpoint(tmp_path, EVEN)
    loader = loaders(tmp_path, 2)[1]
    model = loader.model()
    mtp = loader.mtp(model)
    assert mtp.embed_tokens is model.embed_tokens and mtp.lm_head is model.lm_head


def test_layers_one_by_one(tmp_path):
    write_checkpoint(tmp_path, EVEN)
    loader = loaders(tmp_path, 2)[1]
    model = loader.model()
    for layer, whole in enumerate([*model.layers, loader.mtp(model).layer]):
        for ours, right in ((loader.layer(layer), whole), (loader.attention(layer), whole.attention)):
            assert all(torch.equal(a, b) for a, b in zip(leaves(ours), leaves(right), strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_are_converted(stored, dtype, tmp_path):
    """The correction bias is float32 in the file, and stays so: rounding it would choose other experts."""
    tensors = written(tmp_path, ODD, dtype=stored)
    each = loaders(tmp_path, 3, dtype=DTYPES[dtype])
    models = [loader.model() for loader in each]
    Whole(tensors, ODD).model(models)
    biases = [layer.feed_forward.e_score_correction_bias for model in models for layer in model.layers[1:]]
    wide = torch.float64 if dtype == "fp64" else torch.float32
    assert {bias.dtype for bias in biases} == {wide}
    assert not torch.equal(biases[0].bfloat16().to(wide), biases[0])
    rest = {leaf.dtype for model in models for leaf in leaves(model) if not any(leaf is bias for bias in biases)}
    assert rest == {DTYPES[dtype]}


@pytest.mark.parametrize(*pairwise(case=[*CASES], dtype=["bf16", "fp64"], quantization=[None, "w8a8"]))
def test_leaves_are_what_programs_take(case, dtype, quantization, tmp_path):
    config, ranks = CASES[case]
    write_checkpoint(tmp_path, config)
    for replicate_query in (False, True):
        given = {"replicate_query": replicate_query, "quantization": quantization}
        shape = StepShape(ranks=ranks, dtype=dtype, **given)
        for loader in loaders(tmp_path, ranks, dtype=DTYPES[dtype], **given):
            model = loader.model()
            found = torch.utils._pytree.tree_map(lambda t: (tuple(t.shape), t.dtype), (model, loader.mtp(model)))
            asked = (model_avals(config, shape), mtp_avals(config, shape))
            assert found == torch.utils._pytree.tree_map(
                lambda a: (a.shape, DTYPES[a.dtype]), asked, is_leaf=lambda each: isinstance(each, Aval)
            )


@pytest.mark.parametrize("case", CASES)
def test_8_bit_leaves_are_those_of_the_slices(case, tmp_path):
    config, ranks = CASES[case]
    write_checkpoint(tmp_path, config)
    for plain, small in zip(loaders(tmp_path, ranks), loaders(tmp_path, ranks, quantization="w8a8"), strict=True):
        found, wide = ((model := loader.model(), loader.mtp(model)) for loader in (small, plain))
        flat, _ = torch.utils._pytree.tree_flatten(found, is_leaf=lambda each: isinstance(each, Quantized))
        asked = [
            quantize_int8(each) if isinstance(ours, Quantized) else each
            for each, ours in zip(leaves(wide), flat, strict=True)
        ]
        for a, b in zip(leaves(asked), leaves(flat), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
        assert sum(isinstance(each, Quantized) for each in flat) >= 4 * (config.num_hidden_layers + 1)


def test_fp8_blocks_that_ranks_share(tmp_path):
    """Parts of 48 heads and columns start inside the blocks of 128, whose factors differ by far."""
    attention = evolve(EVEN.attention, hidden_size=150, kv_lora_rank=140, qk_nope_head_dim=45, v_head_dim=47)
    config = evolve(EVEN, attention=attention, intermediate_size=200, storage="fp8")
    write_checkpoint(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        noise = torch.rand(tensors[name].shape, generator=torch.manual_seed(len(name)))
        tensors[name] = (noise * 10 - 5).exp()
    save_file(tensors, tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, weight = tensors.pop(name), name.removesuffix("_scale_inv")
        small = tensors[weight].float()
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: small.shape[0], : small.shape[1]]
        tensors[weight] = small * spread
    for dtype in (torch.float32, torch.bfloat16):
        each = loaders(tmp_path, 4, dtype=dtype)
        Whole(tensors, config).model([loader.model() for loader in each])


# --- what is read ----------------------------------------------------------------------------------

#: On every rank; of all other tensors each element is on one.
REPLICATED = ("norm", "gate.weight", "bias", "q_a_proj", "kv_a_proj")


class Asked:
    """`safe_open` that counts, for each tensor, which elements are asked for."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self.counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in tensors.items()}

    def __call__(self, path, framework):
        asked, real = self, safe_open(path, framework)

        class File:
            def __enter__(self):
                self.file = real.__enter__()
                return self

            def __exit__(self, *error):
                return real.__exit__(*error)

            def get_tensor(self, name):
                asked.counts[name] += 1
                return self.file.get_tensor(name)

            def get_slice(self, name):
                part = self.file.get_slice(name)

                class Slice:
                    def __getitem__(self, index):
                        asked.counts[name][index] += 1
                        return part[index]

                return Slice()

        return File()


@pytest.mark.parametrize("quantization", [None, "w8a8"])
@pytest.mark.parametrize("case", ["even 1", "even 4", "odd 3", "few 6"])
def test_a_rank_reads_its_own_part_once_and_nothing_else(case, quantization, tmp_path, monkeypatch):
    config, ranks = CASES[case]
    tensors = written(tmp_path, config)
    total = Asked(tensors)
    for loader in loaders(tmp_path, ranks, quantization=quantization):
        own = Asked(tensors)
        monkeypatch.setattr("mla_fx.models.checkpoint.safe_open", own)
        loader.mtp(loader.model())
        for name, count in own.counts.items():
            assert count.max() <= 1, f"{name} is read twice"
            total.counts[name] += count
    for name, count in total.counts.items():
        times = ranks if any(part in name for part in REPLICATED) else 1
        assert (count == times).all(), name


def test_all_keys_and_own_values_with_a_replicated_query(tmp_path, monkeypatch):
    tensors = written(tmp_path, EVEN)
    loader = loaders(tmp_path, 2, replicate_query=True)[1]
    asked = Asked(tensors)
    monkeypatch.setattr("mla_fx.models.checkpoint.safe_open", asked)
    loader.attention(0)
    prefix = "model.layers.0.self_attn."
    assert (asked.counts[f"{prefix}q_b_proj.weight"] == 1).all()
    assert asked.counts[f"{prefix}o_proj.weight"].sum(0).tolist() == 10 * [0] + 10 * [24]


class Bar:
    """What stands for tqdm: it adds up."""

    last: "Bar"

    def __init__(self, *, total, disable, **rest):
        self.total, self.disable, self.seen, self.open = total, disable, 0, True
        Bar.last = self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.open = False

    def update(self, count=1):
        assert self.open
        self.seen += count


@pytest.mark.parametrize(
    ("case", "quantization"),
    mostly_soak(itertools.product(CASES, [None, "w8a8"]), [*((case, None) for case in CASES), ("few 6", "w8a8")]),
)
def test_the_bar_ends_at_its_total(case, quantization, tmp_path, monkeypatch):
    config, ranks = CASES[case]
    write_checkpoint(tmp_path, config)
    monkeypatch.setattr("mla_fx.models.load.tqdm", Bar)
    for loader in loaders(tmp_path, ranks, quantization=quantization, progress=True):
        model = loader.model()
        assert Bar.last.seen == Bar.last.total > 0
        assert Bar.last.disable is None, "tqdm hides it where nobody looks"
        loader.mtp(model)
        assert Bar.last.seen == Bar.last.total
    loaders(tmp_path, 1)[0].model()
    assert Bar.last.disable is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 3}, "ranks: must divide num_attention_heads, 4: got 3"),
        ({"ranks": 0}, "ranks: must be an integer of at least 1, or a Layout: got 0"),
        ({"rank": 2}, r"rank: must be in 0\.\.1: got 2"),
        ({"rank": -1}, r"rank: must be in 0\.\.1: got -1"),
        ({"dtype": torch.int32}, "dtype: must be one of torch.bfloat16, .*: got torch.int32"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: must be one of torch.bfloat16, .*: got torch.float8_e4m3fn"),
        ({"quantization": "fp4"}, "quantization: must be None or w8a8: got 'fp4'"),
    ],
)
def test_refusals(arguments, message, tmp_path):
    write_checkpoint(tmp_path, EVEN)
    given = {"rank": 0, "ranks": 2, "dtype": torch.float32, **arguments}
    with pytest.raises(InputError, match=message):
        Loader(checkpoint=Checkpoint.open(tmp_path), **given)


def test_layers_that_are_not_there(tmp_path):
    write_checkpoint(tmp_path, evolve(EVEN, num_nextn_predict_layers=0))
    (loader,) = loaders(tmp_path, 1)
    for layer in (-1, 2):
        with pytest.raises(InputError, match=rf"layer: must be in 0\.\.1 or a prediction layer .*: got {layer}"):
            loader.layer(layer)
        with pytest.raises(InputError, match=rf"layer: must be in 0\.\.1 or a prediction layer .*: got {layer}"):
            loader.attention(layer)
    with pytest.raises(CheckpointError, match=r"must have the tensors of a prediction layer, model.layers.2: got none"):
        loader.mtp(loader.model())
