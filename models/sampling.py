"""How a token is chosen from logits: a value for each request, and functions of logits, text and noise.

    logits -> penalties -> temperature -> top_k -> top_p -> min_p -> p       the distribution
    token  =  argmax over v of p[v] / e[v],   e[v] ~ Exp(1)                  one draw from it

The order and the meaning of the filters are those of transformers; presence_penalty is as in vLLM.

The noise e is a function of seed and position alone (Philox, a generator by counter), so what is drawn at a position
depends on nothing that is served beside it, and on no draft: a draft is accepted where it is the token that is drawn.
For a draft that knows nothing of the noise this is rejection sampling: it is accepted with probability p[draft], and
a token that takes its place has the distribution p without it (arXiv 2211.17192, for a draft that is certain).  A
drafter that draws with the same noise is accepted more often, and still changes nothing (arXiv 2408.07978).
"""

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from attrs import define, field, fields, frozen

from mla_fx.effects import InputError


def _number(name: str, value: Any, rule: str, fits: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not fits(value):
        raise InputError(f"{name}: must be {rule}: got {value!r}")


def _integer(value: Any) -> Any:
    """An integer of any library as Python's; what is none is left to the check, which names it."""
    try:
        return index(value)
    except TypeError:
        return value


@frozen(kw_only=True)
class Sampling:
    """How a request's tokens are chosen; the defaults are greedy decoding.

    `temperature` 0 takes the likeliest token.  `top_k` (0: off) keeps the k likeliest tokens, `top_p` the fewest whose
    probabilities reach p, `min_p` those at least min_p times as likely as the likeliest.  `repetition_penalty` divides
    positive and multiplies negative logits of every token in prompt and text (arXiv 1909.05858); `presence_penalty` is
    subtracted from the logits of those in the text.  `seed` decides what is drawn.
    """

    temperature: float = 0.0
    top_k: int = field(default=0, converter=_integer)
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int = field(default=0, converter=_integer)

    def __attrs_post_init__(self) -> None:
        _number("temperature", self.temperature, "a finite number of at least 0", lambda x: x >= 0 and math.isfinite(x))
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError(f"top_k: must be an integer of at least 0 (0: off): got {self.top_k!r}")
        _number("top_p", self.top_p, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
        _number("min_p", self.min_p, "a number in 0..1", lambda x: 0 <= x <= 1)
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            "a finite number above 0",
            lambda x: x > 0 and math.isfinite(x),
        )
        _number("presence_penalty", self.presence_penalty, "a finite number", math.isfinite)
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise InputError(f"seed: must be an integer in 0..2**64 - 1: got {self.seed!r}")

    @property
    def penalised(self) -> bool:
        """Whether the logits of a token depend on the text before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def plain(self) -> bool:
        """Whether the token is that with the highest logit, whatever came before."""
        return self.temperature == 0 and not self.penalised


#: The names of the fields, which are those of generation_config.json and of the command line.
FIELDS = tuple(attribute.name for attribute in fields(Sampling))


def noise(seed: int, position: int, vocabulary: int) -> torch.Tensor:
    """Exponential noise [vocabulary], float64, for one position of one text."""
    # The low word of the counter counts within a position, so that positions do not overlap.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=position << 64))
    return torch.from_numpy(generator.standard_exponential(vocabulary)).clamp_(min=torch.finfo(torch.float64).tiny)


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities [V], float64, of penalised logits [V]; where the temperature is 0, of the likeliest token only."""
    wide = logits.double()
    if sampling.temperature == 0:
        return torch.zeros_like(wide).index_fill_(0, wide.argmax(), 1.0)
    wide = (wide - wide.max()) / sampling.temperature
    if 0 < sampling.top_k < len(wide):
        wide = wide.masked_fill(wide < wide.topk(sampling.top_k).values[-1], -math.inf)
    likely = torch.softmax(wide, 0)
    if sampling.top_p < 1:
        ordered, order = likely.sort(descending=True, stable=True)
        likelier = ordered.cumsum(0) - ordered
        likely = likely.index_fill(0, order[likelier >= sampling.top_p], 0.0)
    if sampling.min_p > 0:
        likely = torch.where(likely < sampling.min_p * likely.max(), 0.0, likely)
    return likely / likely.sum()


@define(eq=False)
class Sampler:
    """Chooses the tokens of one request.  It keeps which tokens its text has, so a token costs the same at any length.

    `prompt` is the number of tokens that were asked with; what follows them has been generated.
    """

    sampling: Sampling
    prompt: int
    _noted: int = field(default=0, init=False)
    _present: torch.Tensor | None = field(default=None, init=False)  # bool [2, V]: in prompt or text, in the text

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> int:
        """The token behind `tokens`, prompt and text so far, from logits [V] on the host."""
        return self._draw(self._penalised(logits.double(), tokens), len(tokens))

    def draft(self, logits: torch.Tensor, tokens: Sequence[int], ahead: int) -> int:
        """A guess at the token `ahead` positions behind the next one, drawn with that position's own noise."""
        return self._draw(self._penalised(logits.double(), tokens), len(tokens) + ahead)

    def _draw(self, logits: torch.Tensor, position: int) -> int:
        if self.sampling.temperature == 0:
            return int(logits.argmax())
        likely = distribution(logits, self.sampling)
        return int((likely / noise(self.sampling.seed, position, len(likely))).argmax())

    def _penalised(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        if not self.sampling.penalised:
            return logits
        if self._present is None:
            self._present = torch.zeros(2, len(logits), dtype=torch.bool)
        for place in range(self._noted, len(tokens)):
            self._present[0 if place < self.prompt else slice(None), tokens[place]] = True
        self._noted = len(tokens)
        anywhere, said = self._present
        penalty = self.sampling.repetition_penalty
        logits = torch.where(anywhere, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        return logits.sub(said.double(), alpha=self.sampling.presence_penalty)


@frozen
class Logprobs:
    """Natural logarithms of a token's probability and of the likeliest tokens', by the logits as the model gave them.

    `top` has pairs of token and logarithm, the likeliest first.  Penalties, temperature and filters are left out.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: torch.Tensor, token: int, count: int) -> Logprobs:
    """Of logits [V] on the host: those of `token` and of the `count` likeliest."""
    logs = torch.log_softmax(logits.double(), 0)
    best = logs.topk(min(count, len(logs)))
    return Logprobs(float(logs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
