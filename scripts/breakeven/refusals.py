"""What cannot be compared, and why: reasons "id: sentence" of one arm, of an arm and its baseline, and of a pair's numbers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from breakeven import acceptance
from breakeven.arms import Arm, is_random

LENGTH_DRIFT = 0.10  # mean output lengths may differ by this share
CACHE_DRIFT = 0.05  # shares of cached prompt tokens may differ by this much
DEGENERATE_SHARE = 0.20  # this share of outputs may be degenerate; a small greedy model loops now and then

REASONS = {
    "preflight": "the preflight found that the drafter would be served wrong, so no server was started",
    "random-prompts": "prompts of random tokens say nothing about acceptance on text",
    "inconsistent-passes": "the passes of one arm were not run alike",
    "too-few-passes": "fewer passes than the protocol asks for",
    "impossible-acceptance": "acceptance counts that no run can produce",
    "degenerate-output": "outputs are loops, which any drafter guesses, or no text at all",
    "no-baseline": "no arm without speculation for this engine and protocol",
    "other-sampling": "other sampling settings than the baseline",
    "other-machine": "another machine than the baseline",
    "other-version": "another engine version than the baseline",
    "other-flags": "other server flags or environment than the baseline",
    "other-prompts": "other prompts than the baseline",
    "output-length": "output lengths drift apart",
    "unequal-cache": "under load, another share of cached prompt tokens than the baseline",
    "no-decode-time": "a request without a measurable decode time",
}
"""Every reason to refuse a comparison, by id."""

OF_THE_TEXTS = {"output-length", "degenerate-output"}
"""Reasons that lie in what was generated, which differs from pass to pass where it is sampled."""


def ids(found: Sequence[str]) -> list[str]:
    """The ids of such reasons."""
    return [reason.split(":")[0] for reason in found]


def reasons(arm: Arm, arms: Sequence[Arm]) -> tuple[Arm | None, list[str]]:
    """The baseline of an arm with speculation among `arms` (None: there is none), and every reason not to compare them."""
    found = own_reasons(arm)
    baseline, differences = find_baseline(arm, arms)
    found += differences
    if baseline is not None:
        found += pair_reasons(arm, baseline)
        found += [reason for reason in own_reasons(baseline) if reason not in found]
    return baseline, found


def lasting(arm: Arm, found: Sequence[str]) -> list[str]:
    """Of the ids of reasons, those that further passes cannot change; what sampled texts are like may change."""
    return [reason for reason in ids(found) if reason not in OF_THE_TEXTS or arm.protocol.get("temperature") == 0]


def own_reasons(arm: Arm) -> list[str]:
    """Why this arm's measurement cannot enter any comparison, each "id: sentence"."""
    reasons = []
    if is_random(arm):
        reasons.append("random-prompts: the prompts are random tokens, on which acceptance and speed mean nothing")
    for number, manifest in arm.manifests.items():
        changed = [
            key for key in ("machine", "versions", "parameters") if _stable(manifest, key) != _stable(arm.manifest, key)
        ]
        if changed:
            reasons.append(
                f"inconsistent-passes: pass {number} of arm {arm.name} differs from the first in {', '.join(changed)}"
            )
            break
    prompts = arm.requests.groupby("pass_number")["prompt_id"].agg(frozenset)
    if prompts.nunique() > 1:
        reasons.append(f"inconsistent-passes: the passes of arm {arm.name} did not measure the same prompts")
    if len(arm.manifests) < arm.wanted:
        reasons.append(f"too-few-passes: {len(arm.manifests)} of {arm.wanted} passes of arm {arm.name} are there")
    impossible = impossible_acceptance(arm)
    if impossible:
        reasons.append(f"impossible-acceptance: {impossible}")
    if arm.degenerate_share > DEGENERATE_SHARE:
        reasons.append(f"degenerate-output: arm {arm.name}: {degenerate_outputs(arm)}")
    if arm.requests["rate"].isna().any():
        row = arm.requests[arm.requests["rate"].isna()].iloc[0]
        reasons.append(
            f"no-decode-time: prompt {row['prompt_id']} of arm {arm.name} has {row['completion_tokens']} output tokens"
            f" in {row['e2e_s'] - row['ttft_s']:.3f} s after the first"
        )
    return reasons


def degenerate_outputs(arm: Arm) -> str:
    """How many of an arm's outputs, of which there must be some, are degenerate, with the first of them."""
    (loops, outputs), (improbable, first) = arm.loops, arm.improbable
    of = "first answers" if first < outputs else "outputs"
    counts = [f"{loops} of {outputs} outputs repeat themselves"] if loops else []
    counts += [f"{improbable} of {first} {of} are improbable"] if improbable else []
    row = arm.requests[arm.requests["degenerate"].notna()].iloc[0]
    return f"{' and '.join(counts)} (prompt {row['prompt_id']}: {row['degenerate']})"


def _stable(manifest: Mapping[str, Any], key: str) -> Any:
    """The part of a manifest that must be the same in all passes of an arm."""
    if key == "machine":
        return manifest["machine"]["fingerprint"]
    return {k: v for k, v in manifest[key].items() if k != "pass"}


def impossible_acceptance(arm: Arm) -> str | None:
    """What is impossible about an arm's acceptance counts, in any request or in a pass's counters; None if nothing is."""
    if not arm.speculates:
        return None
    counted = [
        (f"prompt {row['prompt_id']}, pass {row['pass_number']}", row) for row in arm.requests.to_dict("records")
    ]
    counted += [(f"counters of pass {n}", row) for n, row in zip(arm.manifests, arm.per_pass or [], strict=False)]
    for where, row in counted:
        if pd.isna(row["steps"]) or pd.isna(row["accepted"]):
            continue
        steps, accepted = int(row["steps"]), int(row["accepted"])
        drafted = None if pd.isna(row["drafted"]) else int(row["drafted"])
        positions = row["accepted_per_position"]
        found = [] if positions is None else acceptance.impossible(steps, list(positions), accepted, drafted)
        if positions is not None and len(positions) > arm.k:
            found.append(f"{len(positions)} positions at K = {arm.k}")
        if accepted > arm.k * steps:
            length = f"{1 + accepted / steps:.2f}" if steps else "infinite"
            found.insert(0, f"acceptance length {length} above K + 1 = {arm.k + 1}")
        if found:
            return f"{where}: {found[0]}"
    return None


def find_baseline(arm: Arm, arms: Sequence[Arm]) -> tuple[Arm | None, list[str]]:
    """The baseline with the same identity and no reason; else the nearest one and why it is none (or None)."""
    candidates = [
        other
        for other in arms
        if not other.speculates
        and other.parameters["engine"] == arm.parameters["engine"]
        and other.protocol["name"] == arm.protocol["name"]
    ]
    if not candidates:
        return None, [
            f"no-baseline: no arm without speculation for engine {arm.parameters['engine']} and protocol"
            f" {arm.protocol['name']}; add one to the arms"
        ]
    differences = [identity_reasons(arm, candidate) for candidate in candidates]
    best = min(range(len(candidates)), key=lambda i: len(differences[i]))
    return candidates[best], differences[best]


def identity_reasons(arm: Arm, baseline: Arm) -> list[str]:
    """One reason per part of the identity that differs, with both values."""
    reasons = []
    for reason, mine in arm.identity.items():
        other = baseline.identity[reason]
        if mine == other:
            continue
        if isinstance(mine, dict):
            keys = sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))
            text = ", ".join(f"{key} {_show(mine.get(key))} against {_show(other.get(key))}" for key in keys)
        else:
            text = f"{_show(mine)} against {_show(other)}"
        reasons.append(f"{reason}: {text} in baseline {baseline.name}")
    return reasons


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def pair_reasons(arm: Arm, baseline: Arm) -> list[str]:
    """Why the measurements of two arms of the same identity cannot be paired."""
    reasons = []
    mine, other = (a.requests.drop_duplicates("prompt_id").set_index("prompt_id") for a in (arm, baseline))
    if set(mine.index) != set(other.index):
        odd = sorted(set(mine.index) ^ set(other.index))
        reasons.append(f"other-prompts: {len(odd)} prompts are in only one of the two arms, the first is {odd[0]}")
    else:
        changed = [p for p in mine.index if list(mine.prompt_token_ids[p]) != list(other.prompt_token_ids[p])]
        if changed:
            reasons.append(
                f"other-prompts: prompt {changed[0]} has other token ids than in baseline {baseline.name}"
                " (another chat template or tokenizer)"
            )
    lengths = [a.requests["completion_tokens"].mean() for a in (arm, baseline)]
    if not abs(lengths[0] / lengths[1] - 1) <= LENGTH_DRIFT:
        reasons.append(
            f"output-length: {lengths[0]:.0f} output tokens per request against {lengths[1]:.0f} in baseline"
            f" {baseline.name}, more than {LENGTH_DRIFT:.0%} apart"
        )
    unequal = unequal_cache(arm, baseline)
    if unequal and arm.concurrency > 1:
        reasons.append(f"unequal-cache: {unequal}")
    return reasons


def unequal_cache(arm: Arm, baseline: Arm) -> str | None:
    """How the shares of cached prompt tokens differ, and what to do; None where they do not, or one is unknown.

    vLLM drops the last cached block of a prompt where EAGLE runs. Single stream that is time before the first token,
    which decode speed leaves out; under load other requests wait for it.
    """
    shares = arm.cached_share, baseline.cached_share
    if None in shares or abs(shares[0] - shares[1]) <= CACHE_DRIFT:
        return None
    return (
        f"{shares[0]:.0%} of the prompt tokens were cached against {shares[1]:.0%} in baseline {baseline.name}; switch prefix"
        " caching off in both arms (flags no-enable-prefix-caching: true of vLLM, disable-radix-cache: true of SGLang)"
    )


def apart(arm: Arm, baseline: Arm) -> float | None:
    """Seconds between the measurements of two arms of several passes each; None where they overlap, as interleaved ones do.

    Passes show how the machine's speed varies while they last; what it did before or after, they cannot show.
    """
    (begin, end), (other_begin, other_end) = arm.window, baseline.window
    gap = max(begin - other_end, other_begin - end)
    return gap if gap > 0 and min(len(arm.manifests), len(baseline.manifests)) > 1 else None
