"""Why an arm is slow or disappointing: integration, training or the cost of a step, decided from counts.

Decision table (docs/verdict.md works an example through):

    served walk rejected, served below offline      integration (and the fault, if one hypothesis explains the counts);
                                                    mixed if even the offline AL is at or below rho
    not rejected, faster                            nothing to blame; cost if a step took longer than step_cost said
    not rejected, no gain, no comparable drafter    cost (mixed if training is also below what its data gives)
      reaches rho at this K
    not rejected, no gain, comparable drafters      training if AL is low for its data or the data is few,
      do reach rho                                  else cost
    the same, of other drafts than EAGLE-3          cost if rho is K + 1 or more, else nothing: none are comparable
    no offline walk on the served outputs, but      "integration or distribution": the two cannot be told apart
      held-out AL far above served AL               without it
    held-out AL far above both walk and served AL   training, fault "distribution": served prompts are unlike the data
    undecided with room for a gain, refused         nothing but integration is judged

Was the drafter served as built? Let S be the verification steps of one served pass and a_i the steps whose draft was
accepted up to position i (a_0 = S). The walk re-drafts the very same outputs offline. Drafts are greedy, so on given
outputs acceptance is a function of the text, at any temperature; a faithful engine therefore reproduces the walk's
conditional acceptances c_i up to its arithmetic. The model is

    a_i | a_{i-1} ~ BetaBinomial(a_{i-1}, mean c_i, variance of the mean 4 floor^2 c_i (1 - c_i) + 1 / (n_i + 1)^2)

for i = 1 ... K, independent over i given the chain, with n_i the walk's trials at position i and c_i smoothed by half a
count. `floor` (1.5 %, acceptance.ENGINE_NUMERICS) is the overdispersion between two faithful runs, its standard deviation
at c = 1/2 and in proportion to sqrt(c (1 - c)) elsewhere, because acceptance near 0 or 1 has little to vary: an intraclass
correlation of 4 floor^2, so that no number of steps counts for more than 1 / (4 floor^2) = 1,111. The second term is one
step more or less, since the walk leaves out the last step of each output. Both walks see the same text, so the binomial variance is
an upper bound and the walk's own sampling error is not added: the test is conservative where texts are shared, and does
not apply where they are not. One pass only: repeats of greedy outputs are copies, not new steps.

    rejected     sum of z_i^2 exceeds the chi-squared quantile with K degrees of freedom at 1 - REJECT; z_i compares
                 a_i / a_{i-1} with c_i under the variance above; positions with fewer than MINIMUM_TRIALS trials drop out
    named        only if (1) "as built" is rejected, (2) the best hypothesis has a log-likelihood at least CLEARLY above
                 "as built", and (3) is not rejected itself
    set          all hypotheses within INDISTINCT of the best in log-likelihood are reported together

REJECT = 1 % holds the false-alarm rate; CLEARLY = 5 is a likelihood ratio of 148, "very strong" in the scale of Kass &
Raftery (1995, JASA 90, 773-795), and covers a dozen hypotheses: under "as built", the chance that a given rival gains a
likelihood ratio of R is at most 1 / R (Markov), 12 / 148 = 8 % for all of them, and condition (1) must hold as well.
INDISTINCT = 3 is a ratio of 20. A hypothesis outside the list cannot be named: then the fault is "unknown".

Pooled counts hide faults that leave the mean alone: a drafter with another theta, or with neighbouring layers, accepts
nearly as often, but in other places. The paired likelihood looks at each output s by itself. Its walk and its served
steps see the same text, so without numerics they would be equal; a step turns out otherwise for reasons of arithmetic
in `floor` of all cases, one way or the other, and the walk leaves out the last step. With d = served - walk,

    d_{s,i} ~ Normal(0, 2 floor n_s + 1)      n_s served steps of the output; i = 1 ... K

The variance is the same under every hypothesis, so likelihoods differ only by how near the walk comes. Where these
likelihoods are given they replace the pooled ones, and "as built" is also rejected if the chi-squared of the d over
their standard deviations rejects it, or if a hypothesis that is not rejected so beats it by CLEARLY.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from breakeven import acceptance, stepcost

REJECT = 0.01
CLEARLY = 5.0
INDISTINCT = 3.0
MINIMUM_STEPS = 100  # fewer verification steps say nothing about integration
MINIMUM_TRIALS = 10  # at one position
SAME_TOKENS = 0.2  # walk and served pass must cover the same tokens, this share apart; the walk K fewer of each output
LOW = 0.9  # AL below this share of what comparable runs reach is low
GAP = 0.75  # served (AL - 1) below this share of the held-out one is a gap that prompts alone seldom make
NO_GAIN = 1.05  # a speed-up whose interval ends below this is not worth having

AS_BUILT = "as-built"
FAULTS = {
    "layers-minus-1": "the engine captures the layers before the trained ones",
    "layers-plus-1": "the engine captures the layers after the trained ones",
    "layers-reversed": "the features are concatenated in another order than in training",
    "fc-skipped": "fc is skipped, as under the algorithm EAGLE instead of EAGLE3",
    "fc-skipped-own-head": "fc is skipped and the final hidden state fed (eagle_config.use_aux_hidden_state is false)",
    "d2t-zero": "draft ids are taken as target ids (d2t missing or zero)",
    "d2t-absolute": "d2t is read as offsets but holds target ids, or the other way round",
    "theta-10000": "RoPE runs with theta 10,000 instead of the trained one",
    "norm-before-residual": "norm_before_residual is served other than trained",
    "norm-before-fc": "norm_before_fc is served other than trained",
    "norm-output": "norm_output is served other than trained",
    "shift-by-one": "features and tokens are off by one position",
    "target-head": "the drafter's own head is replaced by the target's",
}
"""Hypotheses of the what-if matrix (tables.WHAT_IF), what each would mean."""

NO_ACCEPTANCE = {"impossible-acceptance", "random-prompts", "degenerate-output"}
"""Reasons of refusal that leave acceptance without a meaning; under any other one integration is still judged."""


@dataclass(frozen=True)
class Counts:
    """Verification steps, and of these the steps accepted up to and including position 1 ... K."""

    steps: int
    accepted: tuple[int, ...]

    def __post_init__(self):
        acceptance.check(self.steps, self.accepted)

    @property
    def k(self) -> int:
        return len(self.accepted)

    @property
    def length(self) -> float:
        """Acceptance length; nan without a step."""
        return acceptance.acceptance_length(self.steps, sum(self.accepted))

    @property
    def tokens(self) -> int:
        """Tokens that these steps yielded, bonus tokens included."""
        return self.steps + sum(self.accepted)

    @property
    def trials(self) -> np.ndarray:
        """Steps that reached each position, int64 [K]."""
        return np.array([self.steps, *self.accepted[:-1]], dtype=np.int64)[: self.k]


class Fitness(NamedTuple):
    """How well one hypothesis explains the served counts."""

    hypothesis: str
    log_likelihood: float
    p_value: float  # of the chi-squared test over the positions
    length: float  # AL that the hypothesis predicts


def _mean_and_variance(curve: Counts, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Conditional acceptance [K] of a walk, and the variance of a faithful run's true value about it."""
    trials = curve.trials
    mean = (np.array(curve.accepted) + 0.5) / (trials + 1)
    spread = mean * (1 - mean)
    return mean, np.minimum(4 * floor**2 * spread + 1 / (trials + 1) ** 2, spread / 2)


def log_likelihood(served: Counts, curve: Counts, floor: float = acceptance.ENGINE_NUMERICS) -> float:
    """Beta-binomial log-likelihood of served counts under a walk's curve, without the constants that all share."""
    _same_k(served, curve)
    mean, variance = _mean_and_variance(curve, floor)
    size = mean * (1 - mean) / variance - 1  # alpha + beta
    alpha, beta = mean * size, (1 - mean) * size
    hits, misses = np.array(served.accepted), served.trials - np.array(served.accepted)
    return float((special.betaln(alpha + hits, beta + misses) - special.betaln(alpha, beta)).sum())


def p_value(served: Counts, curve: Counts, floor: float = acceptance.ENGINE_NUMERICS) -> float:
    """Chi-squared p-value of served counts under a walk's curve; 1 if no position has enough trials."""
    _same_k(served, curve)
    mean, variance = _mean_and_variance(curve, floor)
    trials = served.trials
    enough = (trials >= MINIMUM_TRIALS) & (curve.trials >= MINIMUM_TRIALS)
    if not enough.any():
        return 1.0
    rate = np.array(served.accepted)[enough] / trials[enough]
    mean, variance = mean[enough], variance[enough] + mean[enough] * (1 - mean[enough]) / trials[enough]
    return float(special.chdtrc(enough.sum(), ((rate - mean) ** 2 / variance).sum()))


def _same_k(served: Counts, curve: Counts) -> None:
    if served.k != curve.k:
        raise ValueError(f"served counts of K = {served.k} and a walk of K = {curve.k} cannot be compared")


def resolution(served: Counts, floor: float = acceptance.ENGINE_NUMERICS) -> float:
    """The change in the first position's acceptance that these steps can just show (sd times the test's quantile)."""
    m = served.accepted[0] / served.steps
    return math.sqrt(special.chdtri(served.k, REJECT) * m * (1 - m) * (1 / served.steps + 4 * floor**2))


def paired(
    served: Sequence[Counts], walks: Mapping[str, Sequence[Counts]], floor: float = acceptance.ENGINE_NUMERICS
) -> list[Fitness]:
    """How well each hypothesis explains the served counts output by output, best first.

    served and each of the walks: one Counts per output, in the same order.
    """
    fits = []
    for name, curves in walks.items():
        squares, cells, steps, accepted = 0.0, 0, 0, 0
        for mine, theirs in zip(served, curves, strict=True):
            _same_k(mine, theirs)
            gaps = np.array(mine.accepted) - np.array(theirs.accepted)
            squares += float((gaps**2).sum()) / (2 * floor * mine.steps + 1)
            cells += mine.k
            steps, accepted = steps + theirs.steps, accepted + sum(theirs.accepted)
        length = acceptance.acceptance_length(steps, accepted)
        fits.append(Fitness(name, -squares / 2, float(special.chdtrc(cells, squares)), length))
    return sorted(fits, key=lambda fit: -fit.log_likelihood)


@dataclass(frozen=True)
class Integration:
    """Result of `integration`."""

    rejected: bool | None  # None: cannot be known
    lower: bool  # served AL below the walk's
    faults: tuple[str, ...]  # hypotheses that explain the counts, best first; empty if none is named
    fits: tuple[Fitness, ...]  # all hypotheses, best first
    evidence: tuple[str, ...]


def integration(
    served: Counts | None,
    as_built: Counts | None,
    hypotheses: Mapping[str, Counts] | None = None,
    by_output: Sequence[Fitness] | None = None,
    outputs: int = 0,
) -> Integration:
    """Was the drafter served as built, and if not, which hypothesis explains the counts?

    served: one pass. as_built: the walk on the outputs of that pass. hypotheses: the what-if walks on the same outputs;
    an entry "as-built" there replaces `as_built`, since all entries then come from one computation. by_output: what
    `paired` finds for the same hypotheses. outputs: how many there are; a walk ends up to K tokens before each one's end.
    """
    hypotheses = dict(hypotheses or {})
    as_built = hypotheses.pop(AS_BUILT, as_built)
    if served is None or not served.k:
        return Integration(None, False, (), (), ("the engine gave no acceptance per position",))
    if as_built is None:
        return Integration(None, False, (), (), ("there is no offline walk on the served outputs",))
    steps = min(served.steps, as_built.steps)
    if steps < MINIMUM_STEPS:
        return Integration(
            None, False, (), (),
            (f"{steps} verification steps are too few to judge the integration ({MINIMUM_STEPS} are needed)",),
        )  # fmt: skip
    more, tolerance = as_built.tokens - served.tokens, SAME_TOKENS * served.tokens
    if not -(tolerance + outputs * served.k) <= more <= tolerance:
        return Integration(
            None, False, (), (),
            (f"the offline walk covers {as_built.tokens} tokens, the served pass {served.tokens}: not the same outputs",),
        )  # fmt: skip
    fits = [
        Fitness(name, log_likelihood(served, curve), p_value(served, curve), curve.length)
        for name, curve in {AS_BUILT: as_built, **hypotheses}.items()
    ]
    fits.sort(key=lambda fit: -fit.log_likelihood)
    built = next(fit for fit in fits if fit.hypothesis == AS_BUILT)
    p_built, rejected = built.p_value, built.p_value < REJECT
    if by_output:
        fits = list(by_output)
        built = next(fit for fit in fits if fit.hypothesis == AS_BUILT)
        beaten = fits[0].log_likelihood - built.log_likelihood >= CLEARLY and fits[0].p_value >= REJECT
        rejected = rejected or beaten or built.p_value < REJECT
    lower = served.length < as_built.length
    numbers = f"AL {served.length:.2f} served against {as_built.length:.2f} offline on the same outputs"
    where = f"per position {_curve(served)} against {_curve(as_built)}"
    if not rejected:
        evidence = [
            f"served as built: {numbers}, {where} (p = {p_built:.2g}, {served.steps} steps)",
            f"{served.steps} steps can show a change of {resolution(served):.2f} or more in the first position's"
            " acceptance; a smaller fault would stay hidden",
        ]
        return Integration(False, lower, (), tuple(fits), tuple(evidence))
    evidence = [f"not served as built: {numbers}, {where} (p = {p_built:.1g}, {served.steps} steps)"]
    if by_output and p_built >= REJECT:
        evidence.append("the counts of all outputs together agree; output by output they do not")
    best = fits[0]
    near = tuple(fit.hypothesis for fit in fits if best.log_likelihood - fit.log_likelihood < INDISTINCT)
    if not hypotheses:
        evidence.append("no what-if matrix was given, so no fault can be named")
        return Integration(True, lower, (), tuple(fits), tuple(evidence))
    gain = best.log_likelihood - built.log_likelihood
    if gain < CLEARLY or best.p_value < REJECT or AS_BUILT in near:
        evidence.append(
            f"none of the {len(hypotheses)} hypotheses explains the counts: the best, {best.hypothesis}, predicts AL"
            f" {best.length:.2f} (log-likelihood {gain:+.1f} against as built, p = {best.p_value:.1g})"
        )
        return Integration(True, lower, (), tuple(fits), tuple(evidence))
    for name in near:
        fit = next(fit for fit in fits if fit.hypothesis == name)
        evidence.append(
            f"{name}: {FAULTS.get(name, name)}; predicts AL {fit.length:.2f}, log-likelihood"
            f" {fit.log_likelihood - built.log_likelihood:+.1f} against as built (p = {fit.p_value:.2g})"
        )
    if len(near) > 1:
        evidence.append(f"these {len(near)} hypotheses cannot be told apart on {served.steps} steps")
    else:
        others = [fit for fit in fits if fit.hypothesis not in (AS_BUILT, *near)]
        if others:
            evidence.append(
                f"the next best, {others[0].hypothesis}, is {best.log_likelihood - others[0].log_likelihood:.1f} behind"
            )
    return Integration(True, lower, near, tuple(fits), tuple(evidence))


def _curve(counts: Counts) -> str:
    return ", ".join(f"{m:.3f}" for m in acceptance.marginal(counts.steps, counts.accepted))


class Expectation(NamedTuple):
    """What comparable runs reach at one K, as AL."""

    low: float | None  # public reports near that many samples, the lowest if unknown; None below the smallest known run
    high: float  # the best run with that many samples
    potential: float  # the best known at any number of samples
    potential_source: str


def expectation(data: Mapping[str, Any], k: int, samples: int | None = None) -> Expectation:
    """What resources/expectations.json lets expect at K for a drafter of that many samples (unknown: the least of them).

    Between two runs AL is interpolated in log(samples); outside, the nearest run counts. Beyond the largest K of a run
    its last conditional acceptance is kept.
    """
    runs = sorted(data["runs"], key=lambda run: run["samples"])
    curves = [_extended(run["acceptance_length"], k) for run in runs]
    sizes = [run["samples"] for run in runs]
    high = float(np.interp(math.log(samples or sizes[0]), np.log(sizes), curves))
    public = sorted(data["public"], key=lambda run: run["samples"])
    low = min(high, *(run["acceptance_length"] for run in public)) if samples is None else None
    if samples is not None and samples >= public[0]["samples"]:
        points = np.log([run["samples"] for run in public])
        low = min(high, float(np.interp(math.log(samples), points, [run["acceptance_length"] for run in public])))
    best = max(zip(curves, (_source(run, k) for run in runs), strict=True))
    for head in data["published_heads"]:
        if head["k"] <= k:
            best = max(best, (head["acceptance_length"], head["what"]))
    return Expectation(low, high, float(best[0]), best[1])


def _source(run: Mapping[str, Any], k: int) -> str:
    deepest = max(map(int, run["acceptance_length"]))
    return run["what"] + (f", extended beyond K = {deepest}" if k > deepest else "")


def _extended(by_k: Mapping[str, float], k: int) -> float:
    known = np.array([by_k[str(i)] for i in range(1, len(by_k) + 1)])
    return float(stepcost.lengths(stepcost.extend(np.diff(known, prepend=1.0), k))[-1])


@dataclass
class Facts:
    """Everything a verdict is made of. What is not known stays None."""

    label: str  # faster | slower | undecided | refused
    k: int
    served: Counts | None = None  # one pass
    length: float | None = None  # served AL; from `served` where that is given
    as_built: Counts | None = None  # offline walk on the outputs of that pass
    hypotheses: Mapping[str, Counts] = field(default_factory=dict)
    by_output: Sequence[Fitness] | None = None  # the same hypotheses output by output, see `paired`
    outputs: int = 0  # of that pass
    held_out_length: float | None = None  # offline AL at this K on held-out responses
    held_out_accuracy: Sequence[float] | None = None  # per training-time-test step, from training
    speedup: float | None = None
    speedup_high: float | None = None
    rho: float | None = None  # AL / speed-up of this run
    cost: stepcost.StepCost | None = None  # rho by K, to say what another K would give
    predicted_rho: float | None = None  # measured apart from this arm
    samples: int | None = None  # training samples
    response_tokens: int | None = None
    graphs_off: bool = False  # CUDA graphs are disabled on a GPU
    emulated: bool = False  # served in bfloat16 on a CPU that has no instructions for it
    reasons: Sequence[str] = ()  # ids of refusals
    method: str = "eagle3"  # how it drafts; what comparable drafters reach is known of EAGLE-3 alone

    def __post_init__(self):
        if self.length is None and self.served is not None and self.served.steps:
            self.length = self.served.length


@dataclass
class Verdict:
    """cause: integration | integration or distribution | training | cost | mixed | None; fault: what exactly, or None."""

    cause: str | None
    fault: str | None
    evidence: list[str]
    pay: list[dict[str, str]]  # what would pay: rows of change, now, needed, note
    hypotheses: list[dict[str, Any]]  # the what-if matrix against the served counts, best first


def judge(facts: Facts, data: Mapping[str, Any]) -> Verdict:
    """Apply the decision table. data: resources/expectations.json."""
    if set(facts.reasons) & NO_ACCEPTANCE:
        return Verdict(None, None, ["acceptance means nothing here, so no cause is sought"], [], [])
    found = integration(facts.served, facts.as_built, facts.hypotheses, facts.by_output, facts.outputs)
    evidence = list(found.evidence)
    pay = what_would_pay(facts, data) if facts.rho and facts.length else []
    matrix = [fit._asdict() for fit in found.fits]

    def verdict(cause: str | None, fault: str | None = None) -> Verdict:
        return Verdict(cause, fault, evidence, pay, matrix)

    no_gain = facts.label == "slower" or (
        facts.label == "undecided" and facts.speedup_high is not None and facts.speedup_high < NO_GAIN
    )
    evidence += _beside_training(facts)
    if facts.method == "eagle3" and facts.samples is not None and facts.label != "refused":
        evidence.append(_samples_sentence(facts, data))
    if found.rejected and found.lower:
        fault = " or ".join(found.faults) or "unknown"
        if no_gain and facts.rho:
            repaired = facts.hypotheses.get(AS_BUILT, facts.as_built).length
            evidence.append(
                f"served as built it would reach AL {repaired:.2f}, {repaired / facts.rho:.2f}x at this rho of"
                f" {facts.rho:.2f}"
            )
            if repaired <= facts.rho:
                return verdict("mixed", fault)
        return verdict("integration", fault)
    if found.rejected:
        evidence.append("served acceptance is above the offline walk, so the walk does not describe what was served")
        if found.faults:
            return verdict("integration", " or ".join(found.faults))
    held_out = facts.held_out_length
    far = held_out is not None and facts.length is not None and facts.length - 1 < GAP * (held_out - 1)
    if far and (no_gain or facts.label == "refused"):
        evidence.append(f"AL {facts.length:.2f} served against {held_out:.2f} on held-out responses")
        if found.rejected is None:
            missing = "an offline walk on the served outputs (replay_served)"
            if facts.as_built or facts.hypotheses:
                missing = "more prompts or longer outputs" if facts.served else "acceptance per position"
            evidence.append(
                f"integration or distribution: {missing} would tell whether the engine loses it or the served prompts and"
                " lengths are unlike the training data"
            )
            return verdict("integration or distribution")
        if found.rejected is False and not _out_of_reach(facts, data):
            evidence.append("the engine serves what was built: the served prompts are unlike the training data")
            return verdict("training", "distribution")
    if facts.label == "refused":
        return verdict(None)
    if facts.label == "undecided" and not no_gain:
        evidence.append("the speed-up is undecided, so neither training nor cost is blamed")
        return verdict(None)
    if facts.length is None or not facts.rho:
        evidence.append("acceptance length or speed-up is unknown: training and cost cannot be told apart")
        return verdict(None)
    if not no_gain:
        if facts.predicted_rho and facts.speedup_high:
            predicted = facts.length / facts.predicted_rho
            if facts.speedup_high < LOW * predicted:
                evidence.append(
                    f"a step took {facts.rho:.2f} plain steps against {facts.predicted_rho:.2f} measured apart:"
                    f" {facts.speedup:.2f}x instead of {predicted:.2f}x"
                )
                return verdict("cost")
        evidence.append(f"AL {facts.length:.2f} is above break-even ({facts.rho:.2f})")
        return verdict(None)
    evidence.append(
        f"AL {facts.length:.2f} against break-even rho {facts.rho:.2f} at K = {facts.k}; no drafter can be faster than"
        f" {stepcost.ceiling(facts.k, facts.rho):.2f}x there"
    )
    if facts.method != "eagle3":
        if facts.rho >= facts.k + 1:
            return verdict("cost")
        evidence.append(
            f"what {facts.method} drafts reach elsewhere is not known here: nothing says which of the two is at fault"
        )
        return verdict(None)
    return verdict(_training_or_cost(facts, data, evidence))


def _out_of_reach(facts: Facts, data: Mapping[str, Any]) -> bool:
    return bool(facts.rho) and expectation(data, facts.k, facts.samples).potential <= facts.rho


def _training_or_cost(facts: Facts, data: Mapping[str, Any], evidence: list[str]) -> str:
    """training | cost | mixed for an arm without gain whose integration is not at fault; appends the evidence."""
    known = expectation(data, facts.k, facts.samples)
    sizes = [run["samples"] for run in data["runs"]]
    few = facts.samples is not None and facts.samples < max(sizes)
    if facts.response_tokens is not None:
        near = min(data["tokens"], key=lambda row: abs(math.log(row["response_tokens"] / facts.response_tokens)))
        evidence.append(
            f"trained on {facts.response_tokens:,} response tokens; {near['what']}, gave {near['acceptance_length']:.2f}"
            f" at K = {near['k']}"
        )
    reported = known.low if known.low is not None else 1.0
    below = facts.length < LOW * reported  # low even for its own data
    if known.potential <= facts.rho:
        evidence.append(
            f"the best that comparable drafters reach at K = {facts.k} is {known.potential:.2f} ({known.potential_source}),"
            f" {known.potential / facts.rho:.2f}x at this rho: more data cannot pay, the step must get cheaper"
        )
        return "mixed" if below else "cost"
    if below or (few and facts.length < LOW * known.potential):
        evidence.append(
            f"comparable drafters reach {known.potential:.2f} at K = {facts.k} ({known.potential_source}), which would"
            f" be {known.potential / facts.rho:.2f}x at this rho: more or better training can pay"
        )
        return "training"
    evidence.append(
        f"AL {facts.length:.2f} is in the range of comparable drafters (up to {known.potential:.2f}): the step is too dear"
    )
    return "cost"


def _samples_sentence(facts: Facts, data: Mapping[str, Any]) -> str:
    known, smallest = expectation(data, facts.k, facts.samples), min(run["samples"] for run in data["runs"])
    if facts.samples < smallest:
        return (
            f"trained on {facts.samples:,} samples, fewer than any comparable run; {smallest:,} reach up to"
            f" {known.high:.2f} at K = {facts.k}"
        )
    span = f"{known.low:.2f} to {known.high:.2f}" if known.low is not None else f"up to {known.high:.2f}"
    return f"comparable runs reach {span} at K = {facts.k} with {facts.samples:,} samples"


def _beside_training(facts: Facts) -> list[str]:
    """Conditional acceptance as served beside the training-time accuracies: where is the first big gap?"""
    if facts.served is None or not facts.held_out_accuracy or not facts.served.steps:
        return []
    served = acceptance.conditional(facts.served.steps, facts.served.accepted)
    pairs = [(c, a) for c, a in zip(served, facts.held_out_accuracy, strict=False) if not math.isnan(c)]
    if not pairs:
        return []
    text = (
        f"held-out accuracy per training-time step {', '.join(f'{a:.2f}' for _, a in pairs)}; conditional acceptance"
        f" served {', '.join(f'{c:.2f}' for c, _ in pairs)}"
    )
    first = next((i + 1 for i, (c, a) in enumerate(pairs) if c < GAP * a), None)
    if first == 1:
        text += ": a gap from the first position on, integration or distribution rather than training"
    elif first:
        text += f": the first gap is at position {first}, drafting from its own features is what training lacks"
    return [text]


def what_would_pay(facts: Facts, data: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows (change, now, needed, note): each a single change that would bring the arm to break-even."""
    k, rho, length = facts.k, facts.rho, facts.length
    c = stepcost.needed_conditional(rho, k)
    elsewhere = ""
    if facts.method == "eagle3":
        elsewhere = f"; comparable drafters reach {expectation(data, k, facts.samples).potential:.2f}"
    rows = [
        {
            "change": f"acceptance length at K = {k}",
            "now": f"{length:.2f}",
            "needed": f"above {rho:.2f}",
            "note": "out of reach: a step yields at most K + 1 tokens"
            if c is None
            else f"each draft token accepted with {c:.2f}, given the ones before{elsewhere}",
        },
        {
            "change": "step cost rho",
            "now": f"{rho:.2f}",
            "needed": f"below {length:.2f}",
            "note": f"{1 - length / rho:.0%} less time per step" if length < rho else "above break-even as it is",
        },
        {
            "change": "ceiling (K + 1) / rho",
            "now": f"{stepcost.ceiling(k, rho):.2f}x",
            "needed": "above 1",
            "note": "the speed-up if every draft token were accepted",
        },
    ]
    rows.append(_best_k_row(facts))
    if facts.graphs_off:
        graphs = data["graphs"]
        rows.append(
            {
                "change": "CUDA graphs",
                "now": "off",
                "needed": "on",
                "note": f"elsewhere {graphs['before']} to {graphs['after']} tok/s at the same acceptance length"
                f" ({graphs['source']}); plain decoding gains as well, so measure both arms again",
            }
        )
    if facts.emulated:
        known = data["bfloat16"]
        rows.append(
            {
                "change": "bfloat16",
                "now": "emulated by this CPU",
                "needed": "AVX512-BF16 or AMX",
                "note": f"without them the tokens of a step are bound by arithmetic: rho {known['emulated']} at K ="
                f" {known['k']} where another CPU has {known['computed']} ({known['source']})",
            }
        )
    return rows


def _best_k_row(facts: Facts) -> dict[str, str]:
    row = {"change": "K", "now": str(facts.k), "needed": "unknown", "note": "rho at other K was not measured"}
    if facts.cost is None or facts.served is None or not facts.served.steps:
        return row
    curve = acceptance.marginal(facts.served.steps, facts.served.accepted)
    rho = facts.cost.known(facts.k)
    if not set(rho) - {facts.k}:
        return row
    best = stepcost.best_k(curve, rho)
    if best.k:
        row["needed"] = str(best.k)
        row["note"] = f"AL {best.length:.2f} at rho {rho[best.k]:.2f}: {best.speedup:.2f}x ({facts.cost.source})"
    else:
        row["needed"] = "none"
        row["note"] = f"no K up to {facts.k} pays with this acceptance ({facts.cost.source})"
    following = facts.cost.at(facts.k + 1)
    if following and facts.k in rho and len(curve):
        pays = stepcost.position_pays(
            float(stepcost.extend(curve, facts.k + 1)[-1]), facts.length, rho[facts.k], following
        )
        row["note"] += f"; position {facts.k + 1} would {'pay' if pays else 'not pay'} if acceptance goes on as before"
    return row
