"""Drafts of the prediction module: those of the dense module, however prompts, drafts and rejections went before."""

import pytest
import torch
import torch.nn.functional as F
from attrs import define, field

from mla_fx import backends
from mla_fx.effects import InputError
from mla_fx.models import Checkpoint, Engine, MtpDrafter, Runner
from mla_fx.models.addition import DIRECTORY, problems
from mla_fx.models.addition.model import decoder_layer, rms_norm
from mla_fx.models.tokenizer import Tokenizer
from tests.models.served import make_runner, oracle, random_prompts, run, small

END = 2
MODELS = {"trained": lambda: DIRECTORY, "random": small}


def prompts_of(name, count):
    if name == "random":
        return random_prompts(count, seed=9)
    tokenizer = Tokenizer(DIRECTORY)
    return [tokenizer.encode(prompt) for prompt, _ in problems(count, seed=1)]


def by_hand(dense, tokens, drafts):
    """Logits of the dense module for each of `drafts`, given those before: its own hidden state feeds the next one."""
    tensors, fields = dense.tensors, dense.fields
    layer, eps = fields["num_hidden_layers"], fields["rms_norm_eps"]
    prefix = f"model.layers.{layer}."

    def joined(token_rows, hidden_rows):
        halves = [rms_norm(token_rows, tensors[f"{prefix}enorm.weight"], eps)]
        halves.append(rms_norm(hidden_rows, tensors[f"{prefix}hnorm.weight"], eps))
        return F.linear(torch.cat(halves, dim=-1), tensors[f"{prefix}eh_proj.weight"])

    embedded = F.embedding(torch.tensor(tokens[1:]), tensors[f"{prefix}embed_tokens.weight"])
    embedded[0] = 0
    x = joined(embedded, dense(tokens)[1][:-1])
    logits = []
    for draft in drafts:
        last = decoder_layer(tensors, fields, layer, x[None])[0, -1:]
        normed = rms_norm(last, tensors[f"{prefix}shared_head.norm.weight"], eps)
        logits.append(F.linear(normed, tensors[f"{prefix}shared_head.head.weight"])[0])
        token = F.embedding(torch.tensor([draft]), tensors[f"{prefix}embed_tokens.weight"])
        x = torch.cat((x, joined(token, last)))
    return logits


@define
class Noted:
    """A drafter that notes texts and drafts; every second time it passes on wrong ones, which are rejected."""

    inner: MtpDrafter
    spoil: bool = False
    notes: list = field(factory=list)

    @property
    def count(self):
        return self.inner.count

    def propose(self, served, hidden):
        drafts = self.inner.propose(served, hidden)
        self.notes += [(list(s.request.tokens), mine) for s, mine in zip(served, drafts, strict=True) if mine]
        if self.spoil and len(self.notes) % 2:
            return [[(token + 1) % 8 for token in mine] for mine in drafts]
        return drafts


class Watched(Runner):
    """A runner that keeps the module's logits."""

    def predict(self, *arguments, **options):
        logits, hidden = super().predict(*arguments, **options)
        self.__dict__.setdefault("logits", []).append(logits[0])
        return logits, hidden


def serve(directory, prompts, *, drafts, count=12, ranks=1, requests=2, chunk=32, spoil=False, end=(), blocks=64):
    runner = make_runner(directory, ranks=ranks, requests=requests, blocks=blocks, mtp=drafts > 0)
    drafter = Noted(MtpDrafter(runner, drafts), spoil) if drafts else None
    engine = Engine(runner=runner, chunk=chunk, drafter=drafter, end=end)
    added = [engine.add(prompt, max_new_tokens=count) for prompt in prompts]
    for _ in run(engine):
        pass
    return added, drafter.notes if drafter else []


# --- drafts -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks", "chunk", "spoil", "blocks"),
    [
        ("random", 1, 32, False, 64),
        ("trained", 2, 5, True, 64),
        pytest.param("random", 4, 3, False, 64, marks=pytest.mark.soak),
        ("trained", 2, 32, True, 6),
        ("random", 1, 7, True, 9),
    ],
)
def test_drafts_are_those_of_the_dense_module(name, ranks, chunk, spoil, blocks):
    """Three drafts a time, at every step, whether those before were accepted, rejected, or lost their blocks."""
    directory = MODELS[name]()
    prompts = prompts_of(name, 4)
    added, notes = serve(directory, prompts, drafts=3, ranks=ranks, chunk=chunk, spoil=spoil, blocks=blocks)
    plain, _ = serve(directory, prompts, drafts=0)
    assert [r.new_tokens for r in added] == [r.new_tokens for r in plain]
    assert len(notes) > 10
    lengths = [len(drafts) for _, drafts in notes]
    assert max(lengths) == 3
    for tokens, drafts in notes:
        for draft, logits in zip(drafts, by_hand(oracle(directory), tokens, drafts), strict=True):
            assert logits[draft] > logits.max() - 1e-4


def test_drafts_behind_a_shared_beginning():
    """What the module has of a position depends on the token behind it too: texts that part where a block ends, and
    that part within one, get the drafts of the dense module."""
    directory, stem = small(), random_prompts(1, seed=30)[0][:1] * 3 + list(range(13))
    prompts = [
        [*stem[:cut], *tail] for cut, tail in ((16, [1, 2]), (16, [3, 4]), (16, [1, 2, 5]), (13, [9]), (8, [60, 61]))
    ]
    added, notes = serve(directory, prompts, drafts=2, requests=1)
    assert [request.reused for request in added] == [0, 12, 16, 12, 4]
    for tokens, drafts in notes:
        for draft, logits in zip(drafts, by_hand(oracle(directory), tokens, drafts), strict=True):
            assert logits[draft] > logits.max() - 1e-4


def test_by_hand_is_the_dense_module():
    """The first draft of the steps above is that of the independent module as it is."""
    dense, (tokens,) = oracle(DIRECTORY), prompts_of("trained", 1)
    torch.testing.assert_close(by_hand(dense, tokens, [0])[0], dense.draft_logits(tokens)[-1], rtol=1e-5, atol=1e-5)


def test_rejected_drafts_leave_no_trace():
    """Logits of the module after each of many rejections, against the dense module on the text alone."""
    directory, (prompt, *_) = small(), random_prompts(1, seed=12)
    runner = Watched.load(
        Checkpoint.open(directory), backends.get("cpu", ranks=2), shape=make_runner(directory, ranks=2).shape, mtp=True
    )
    engine = Engine(runner=runner, drafter=Noted(MtpDrafter(runner, 1), spoil=True))
    request = engine.add(prompt, max_new_tokens=30)
    compared = 0
    while engine.busy:
        engine.step()
        if runner.logits and engine.busy:
            right = oracle(directory).draft_logits(request.tokens)[-1]
            torch.testing.assert_close(runner.logits[-1][0], right, rtol=1e-5, atol=3e-5)
            compared += 1
    assert compared > 20
    assert request.drafted - request.accepted > 15


def test_held_out_problems():
    """The drafts of the trained module are mostly accepted, and the answers are those without drafts."""
    prompts = prompts_of("trained", 30)
    plain, _ = serve(DIRECTORY, prompts, drafts=0, requests=8, end=[END])
    for count, least in ((1, 0.6), (3, 0.5)):
        added, _ = serve(DIRECTORY, prompts, drafts=count, requests=8, end=[END])
        assert [r.new_tokens for r in added] == [r.new_tokens for r in plain]
        drafted, accepted = sum(r.drafted for r in added), sum(r.accepted for r in added)
        print(f"\n{count} drafts: {accepted} of {drafted} accepted, {accepted / drafted:.0%}")
        assert accepted > least * drafted


def test_no_draft_is_made_that_cannot_count():
    """Of a request that may have two more tokens, one draft; of one that may have one more, none counts."""
    added, notes = serve(small(), random_prompts(1), drafts=3, count=3)
    assert len(notes[0][1]) == 1
    assert added[0].drafted <= 2


@pytest.mark.parametrize("count", [0, -1, 1.5])
def test_counts_that_are_refused(count):
    runner = make_runner(small(), mtp=True)
    with pytest.raises(InputError, match=rf"^count: must be an integer of at least 1: got {count}$"):
        MtpDrafter(runner, count)
