"""One ranked pool of prompts out of many conversations: filter, count, deduplicate, rank.

A prompt is the beginning of a conversation up to and including one of its user turns; the assistant turns inside it are
the data set's, the answer to it will be the target's. `curate` goes from the cheap filters to the dear ones:

1. walk     every turn checked by its label; the prompts before the first bad turn stay
2. length   in characters, then
3. language of the last user turn
4. tokens   of the rendered prompt
5. rank     a fixed priority order
6. overlap with a benchmark prompt, exact duplicates, near-duplicates: in rank order, so that the best rank survives

What is counted: every prompt (a record with five good user turns counts five), and one more for each record with a bad
turn or with none that can be read. Each is kept or rejected for one reason, so in = kept + rejected.

Rank. Prompt p of source s has the key u(p) * n(s) / weight(s): u in [0, 1) is a hash of the seed and the normalized
text, n(s) the number of distinct prompts of s that passed the filters. Sources thereby come up in the proportion of
their weights until one runs out, and the order within a source does not depend on the others. There is no size here:
the N-prompt set is rank < N.
"""

import functools
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from breakeven.chat import render_text
from breakeven.cli import Progress, UserError
from breakeven.conversations import Message, walk
from breakeven.sources import Source

CHARACTERS_PER_TOKEN = 6  # prose has about 4.5; a prompt with more for each token of the limit is too long for sure
PERMUTATIONS = 64
SHINGLE = 5  # words
RUN = 13  # words in a row that count as an overlap with a benchmark prompt
LANGUAGE_CHARACTERS = 400  # enough for the identifier
LANGUAGE_RATIO = 0.1


@dataclass(slots=True)
class Prompt:
    """messages[:end] of a conversation; `digest` stands for its normalized text."""

    conversation: "Conversation"
    end: int
    turn: int  # 0 for the first user turn
    digest: bytes = b""
    language: str = ""
    n_tokens: int = 0
    key: float = 0.0

    @property
    def prompt_id(self) -> str:
        return f"{self.conversation.id}-{self.turn:02d}"

    @property
    def place(self) -> str:
        return f"{self.conversation.place}/{self.turn}"

    def messages(self) -> list[dict[str, str]]:
        """As [{"role": ..., "content": ...}, ...]."""
        return [{"role": role, "content": content} for role, content in self.conversation.messages[: self.end]]


@dataclass(slots=True)
class Conversation:
    """The good turns of a record, up to the last one that a prompt needs.

    `id` is a hash of all its good turns, `opening` one of the normalized text up to the first user turn.
    """

    source: int
    place: str
    id: str
    messages: list[Message]
    opening: bytes = b""


class Rejected:
    """The rows of rejected.parquet, and their counts."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []

    def add(self, source: str, place: str, reason: str, detail: str = "") -> None:
        self.rows.append({"source": source, "record": place, "reason": reason, "detail": printable(detail)})

    def by_reason(self, source: str | None = None) -> dict[str, int]:
        """How many by reason, most frequent first."""
        counts = Counter(row["reason"] for row in self.rows if source in (None, row["source"]))
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def printable(text: str) -> str:
    """Text that any UTF-8 file can hold: lone surrogates are escaped."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def normalize(text: str) -> str:
    """Text for comparisons: NFKC, case folded, each run of white space one space."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(text.lower().split())


def uniform(*parts: bytes | str | int) -> float:
    """A number in [0, 1) from a hash of `parts`; the same on every machine and in every run."""
    joined = b"\0".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest()[:7]) / 2**56


def curate(
    sources: list[Source],
    tokenizer,
    *,
    benchmark_prompts: list[dict],
    seed: int,
    languages: list[str],
    min_tokens: int,
    max_tokens: int,
    near_duplicate_threshold: float,
    held_out_fraction: float,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[list[dict], Rejected, dict[str, Any]]:
    """The ranked pool as rows of tables.PROMPTS, the rejected ones, and counts (in, kept, rejected, by source ...).

    `tokenizer` is a transformers tokenizer with a chat template; `languages` are ISO 639-1 codes, or ["any"].
    A prompt is held out by a hash of the seed and the first user turn of its conversation, so that neither the size nor
    another continuation of the same opening splits a conversation.
    """
    check_filters(languages, min_tokens, max_tokens, near_duplicate_threshold, held_out_fraction)
    rejected = Rejected()
    prompts = _read(sources, max_tokens, rejected)
    total = len(prompts) + len(rejected.rows)
    names = [source.name for source in sources]

    def drop(prompt: Prompt, reason: str, detail: str = "") -> None:
        rejected.add(names[prompt.conversation.source], prompt.place, reason, detail)

    prompts = _filter_languages(prompts, languages, drop)
    prompts = _filter_tokens(prompts, tokenizer, chat_template_kwargs or {}, min_tokens, max_tokens, drop)
    _set_digests(prompts)
    prompts = _rank(prompts, [source.weight for source in sources], seed)
    prompts = _deduplicate(prompts, benchmark_prompts, near_duplicate_threshold, drop)
    pool = [
        {
            "prompt_id": prompt.prompt_id,
            "messages": prompt.messages(),
            "source": names[prompt.conversation.source],
            "language": prompt.language,
            "n_tokens": prompt.n_tokens,
            "held_out": uniform("held-out", seed, prompt.conversation.opening) < held_out_fraction,
            "rank": rank,
        }
        for rank, prompt in enumerate(prompts)
    ]
    counts = {"in": total, "kept": len(pool), "rejected": rejected.by_reason()}
    counts["held_out"] = sum(row["held_out"] for row in pool)
    counts["conversations"] = len({id(prompt.conversation) for prompt in prompts})
    counts["languages"] = dict(sorted(Counter(row["language"] for row in pool).items()))
    counts["sources"] = {}
    for source in sources:
        kept, reasons = sum(row["source"] == source.name for row in pool), rejected.by_reason(source.name)
        counts["sources"][source.name] = {
            "in": kept + sum(reasons.values()), "kept": kept, "rejected": reasons, "lost": source.lost,
        }  # fmt: skip
    if not pool:
        reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.by_reason().items()) or "they are empty"
        raise UserError(f"no prompt of the sources is left ({total} in; rejected: {reasons}); loosen the filters")
    return pool, rejected, counts


def check_filters(
    languages: list[str], min_tokens: int, max_tokens: int, near_duplicate_threshold: float, held_out_fraction: float
) -> None:
    """UserError for a filter that cannot be meant."""
    if not 0 <= min_tokens <= max_tokens or max_tokens < 1:
        raise UserError(f"min tokens {min_tokens} and max tokens {max_tokens}: 0 <= min <= max and 1 <= max is needed")
    if not 0 < near_duplicate_threshold <= 1:
        raise UserError(
            f"near-duplicate threshold {near_duplicate_threshold}: a Jaccard similarity in (0, 1] is needed"
        )
    if not 0 <= held_out_fraction < 1:
        raise UserError(f"held-out fraction {held_out_fraction}: a share in [0, 1) is needed")
    if languages != ["any"]:
        known = _identifier().labels
        for language in languages:
            if language not in known:
                raise UserError(
                    f"language {language!r}: not a known ISO 639-1 code; use any of {' '.join(known)}, or any"
                )
        if not languages:
            raise UserError('languages: at least one code is needed, or "any"')


def _read(sources: list[Source], max_tokens: int, rejected: Rejected) -> list[Prompt]:
    """Walk every record; prompts that are too long by their characters are rejected here, unseen."""
    prompts: list[Prompt] = []
    limit = max_tokens * CHARACTERS_PER_TOKEN
    for index, source in enumerate(sources):
        found = 0
        for record in source.records():
            found += 1
            if record.turns is None:
                rejected.add(source.name, record.place, record.reason, record.detail)
                continue
            messages, fault = walk(record.turns)
            if fault:
                rejected.add(source.name, record.place, *fault)
            identity, characters = hashlib.blake2b(digest_size=6), 0
            conversation = Conversation(index, record.place, "", messages)
            turn, needed = 0, 0
            for position, (role, content) in enumerate(messages):
                identity.update(f"{role}\0{content}\0".encode())
                characters += len(content)
                if role != "user":
                    continue
                if characters <= limit:
                    prompts.append(Prompt(conversation, position + 1, turn))
                    needed = position + 1
                else:
                    detail = f"{characters} characters, the limit is {limit} for {max_tokens} tokens"
                    rejected.add(source.name, f"{record.place}/{turn}", "too-long", detail)
                turn += 1
            conversation.id = identity.hexdigest()
            conversation.messages = messages[:needed]
        if not found:
            raise UserError(f"source {source.name}: it holds no record at all")
    return prompts


# Language


@functools.cache
def _identifier():
    """py3langid over all languages but zxx (no language), which would take every text with much code."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages([label for label in identifier.labels if label != "zxx"])
    return identifier


_NOT_PROSE = re.compile(r"```.*?(?:```|\Z)|https?://\S+", re.DOTALL)


def _filter_languages(prompts: list[Prompt], languages: list[str], drop) -> list[Prompt]:
    """Keep prompts in one of `languages`.

    The text is the last user turn without code blocks and links, its first 400 characters; below 20 letters ("go on")
    the user turns before it are added. Short and technical texts have no clear language, so a prompt passes if the
    most probable wanted language has at least a tenth of the probability of the most probable one.
    """
    identifier, wanted = _identifier(), set(languages)
    decided: dict[str, tuple[str, str]] = {}  # text -> language, detail of a rejection
    kept = []
    conversation, former = None, ""
    with Progress(len(prompts), "prompts", "language") as progress:
        for prompt in prompts:
            if prompt.conversation is not conversation:
                conversation, former = prompt.conversation, ""
            turn = conversation.messages[prompt.end - 1][1]
            turn = _NOT_PROSE.sub(" ", turn[: 4 * LANGUAGE_CHARACTERS])[:LANGUAGE_CHARACTERS]
            text = turn if sum(map(str.isalpha, turn)) >= 20 else f"{former} {turn}"
            former = f"{former} {turn}"[-LANGUAGE_CHARACTERS:]
            if text not in decided:
                language, probability = identifier.classify(text)
                detail = ""
                if "any" not in wanted and language not in wanted:
                    ranked = identifier.rank(text)
                    best, share = next((label, share) for label, share in ranked if label in wanted)
                    if share >= LANGUAGE_RATIO * ranked[0][1]:
                        language = best
                    else:
                        detail = f"{language} ({probability:.2f})"
                decided[text] = language, detail
            prompt.language, detail = decided[text]
            if detail:
                drop(prompt, "language", detail)
            else:
                kept.append(prompt)
            progress.add(1)
    return kept


# Tokens


class TokenCounter:
    """Counts the tokens of rendered prompts, and tokenizes what prefixes of a conversation share only once.

    A rendered prompt is cut at the tokenizer's added tokens (<|im_start|> ...), which it sets apart itself before
    anything else. Where the pieces do not add up to the whole (`exact` is then False), each text is tokenized whole.
    """

    def __init__(self, tokenizer, sample: list[str]):
        self.tokenizer = tokenizer
        self.added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        longest_first = sorted(self.added, key=lambda token: (-len(token), token))
        self.split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")").split if self.added else None
        self.exact = self.split is not None and self._by_pieces(sample) == self._whole(sample)

    def count(self, texts: list[str]) -> list[int]:
        """The number of tokens of each text."""
        return self._by_pieces(texts) if self.exact else self._whole(texts)

    def _whole(self, texts: list[str]) -> list[int]:
        return (
            [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
            if texts
            else []
        )

    def _by_pieces(self, texts: list[str]) -> list[int]:
        pieces = [[piece for piece in self.split(text) if piece] for text in texts]
        distinct = list(dict.fromkeys(piece for parts in pieces for piece in parts if piece not in self.added))
        length = dict(zip(distinct, self._whole(distinct), strict=True)) | dict.fromkeys(self.added, 1)
        return [sum(length[piece] for piece in parts) for parts in pieces]


def _filter_tokens(prompts: list[Prompt], tokenizer, kwargs, min_tokens, max_tokens, drop) -> list[Prompt]:
    """Render, count, and keep prompts of min_tokens to max_tokens."""
    counter = None
    kept = []
    with Progress(len(prompts), "prompts", "tokens") as progress:
        for start in range(0, len(prompts), 1024):  # neighbours are of one conversation and share their pieces
            batch, texts = [], []
            for prompt in prompts[start : start + 1024]:
                try:
                    texts.append(render_text(tokenizer, prompt.messages(), kwargs))
                    batch.append(prompt)
                except ValueError as error:
                    drop(prompt, "chat-template", str(error)[:200])
            counter = counter or (TokenCounter(tokenizer, texts[:128]) if texts else None)
            for prompt, n_tokens in zip(batch, counter.count(texts) if counter else [], strict=True):
                prompt.n_tokens = n_tokens
                if n_tokens < min_tokens:
                    drop(prompt, "too-short", f"{n_tokens} tokens, {min_tokens} are needed")
                elif n_tokens > max_tokens:
                    drop(prompt, "too-long", f"{n_tokens} tokens, {max_tokens} are allowed")
                else:
                    kept.append(prompt)
            progress.add(len(prompts[start : start + 1024]))
    return kept


# Rank


def _set_digests(prompts: list[Prompt]) -> None:
    """Hash the normalized text of every prompt; prefixes of a conversation are hashed in one go."""
    for conversation, group in _by_conversation(prompts):
        running, at = hashlib.blake2b(digest_size=16), 0
        ends = {prompt.end: prompt for prompt in group}
        for at, (role, content) in enumerate(conversation.messages[: max(ends)], 1):
            running.update(f"{role}\0{normalize(content)}\0".encode())
            if role == "user" and not conversation.opening:
                conversation.opening = running.digest()
            if at in ends:
                ends[at].digest = running.digest()


def _by_conversation(prompts: list[Prompt]) -> Iterator[tuple[Conversation, list[Prompt]]]:
    """Prompts in groups of one conversation; the prompts of a conversation must be neighbours."""
    group: list[Prompt] = []
    for prompt in prompts:
        if group and prompt.conversation is not group[0].conversation:
            yield group[0].conversation, group
            group = []
        group.append(prompt)
    if group:
        yield group[0].conversation, group


def _rank(prompts: list[Prompt], weights: list[float], seed: int) -> list[Prompt]:
    """Sort by the key u * n(s) / weight(s) of the module's docstring; ties (equal texts) go by prompt id and place."""
    distinct: list[set[bytes]] = [set() for _ in weights]
    for prompt in prompts:
        distinct[prompt.conversation.source].add(prompt.digest)
    for prompt in prompts:
        source = prompt.conversation.source
        prompt.key = uniform("rank", seed, prompt.digest) * len(distinct[source]) / weights[source]
    return sorted(prompts, key=lambda p: (p.key, p.prompt_id, p.conversation.source, p.conversation.place))


# Words, shingles, duplicates

# Chinese, Japanese and Korean have no spaces between words or long ones: there each character is a word
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)


class WordHashes(dict):
    """word -> 64-bit hash, computed once."""

    def __missing__(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
        self[word] = value
        return value

    def of(self, text: str) -> np.ndarray:
        """The hashes of the words of normalized text, uint64 [words]."""
        return np.array([self[word] for word in _WORD.findall(text)], dtype=np.uint64)


def grams(words: np.ndarray, n: int) -> np.ndarray:
    """A hash for each run of n words, uint64 [words - n + 1], empty if there are fewer than n words."""
    count = max(len(words) - n + 1, 0)
    value = np.zeros(count, dtype=np.uint64)
    for offset in range(n if count else 0):
        value = value * _BASE + words[offset : offset + count]
    value ^= value >> np.uint64(29)
    return value * np.uint64(0xBF58476D1CE4E5B9)


class Overlap:
    """Finds prompts that overlap a benchmark prompt; only the benchmark's user turns count.

    A prompt overlaps if its text holds, anywhere, 13 words in a row of a benchmark turn, or at least half of the word
    5-grams of one (which also works for turns shorter than 13 words). Turns of fewer than five words are too common to
    be looked for inside a text: there the prompt has to be that very text.
    """

    def __init__(self, benchmark_prompts: list[dict], hashes: WordHashes):
        self.runs: dict[int, str] = {}
        self.tiny: dict[bytes, str] = {}
        self.turns: list[tuple[str, np.ndarray]] = []
        for prompt in benchmark_prompts:
            for message in prompt["messages"]:
                if message["role"] != "user":
                    continue
                words = hashes.of(normalize(message["content"]))
                if len(words) < SHINGLE:
                    self.tiny.setdefault(words.tobytes(), prompt["prompt_id"])
                    continue
                self.turns.append((prompt["prompt_id"], np.unique(grams(words, SHINGLE))))
                for run in grams(words, RUN).tolist():
                    self.runs.setdefault(run, prompt["prompt_id"])
        self.run_hashes = np.array(sorted(self.runs), dtype=np.uint64)
        self.shingle_hashes = np.unique(np.concatenate([np.empty(0, np.uint64)] + [turn for _, turn in self.turns]))

    def find(self, words: np.ndarray, fives: np.ndarray, ends: list[int]) -> dict[int, str]:
        """{end: benchmark prompt id} of those prefixes words[:end] that overlap; `fives` are all 5-grams of words."""
        found: dict[int, str] = {}
        near = np.flatnonzero(np.isin(fives, self.shingle_hashes))
        if len(near):
            runs = grams(words, RUN)
            at = np.flatnonzero(np.isin(runs, self.run_hashes))
            for end in ends:
                if len(at) and at[0] + RUN <= end:
                    found[end] = self.runs[int(runs[at[0]])]
                    continue
                inside = fives[near[near + SHINGLE <= end]]
                for prompt_id, turn in self.turns:
                    if 2 * np.isin(turn, inside).sum() >= len(turn):
                        found[end] = prompt_id
                        break
        if (text := words[: ends[0]].tobytes()) in self.tiny:  # longer prefixes are another text
            found[ends[0]] = self.tiny[text]
        return found


class Sketches:
    """Word 5-grams and MinHash of every prompt, by its index, and which prompts overlap a benchmark prompt.

    What the prefixes of a conversation share is split, hashed and sketched once. A prompt of fewer than five words has
    no sketch.
    """

    def __init__(self, prompts: list[Prompt], benchmark_prompts: list[dict]):
        from datasketch import MinHash

        self.fives: list[Any] = [None] * len(prompts)  # uint64 [words - 4], a view that prefixes share
        self.minhash: list[Any] = [None] * len(prompts)
        self.overlaps: dict[int, str] = {}  # index -> benchmark prompt id
        hashes = WordHashes()
        overlap = Overlap(benchmark_prompts, hashes)
        empty = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=int)  # the 5-grams are hashes already
        groups: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(id(prompt.conversation), []).append(index)
        with Progress(len(prompts), "prompts", "sketches") as progress:
            for group in groups.values():
                group.sort(key=lambda index: prompts[index].end)
                longest = prompts[group[-1]]
                turns = [hashes.of(normalize(text)) for _, text in longest.conversation.messages[: longest.end]]
                words, ends = np.concatenate(turns), np.cumsum([len(turn) for turn in turns])
                lengths = [int(ends[prompts[index].end - 1]) for index in group]
                fives = grams(words, SHINGLE)
                overlapping = overlap.find(words, fives, lengths)
                sketch, done = empty, 0
                for index, length in zip(group, lengths, strict=True):
                    if length in overlapping:
                        self.overlaps[index] = overlapping[length]
                    if length >= SHINGLE:
                        self.fives[index] = fives[: length - SHINGLE + 1]
                        sketch = sketch.copy()
                        sketch.update_batch((self.fives[index][done:] >> np.uint64(32)).tolist())
                        self.minhash[index], done = sketch, len(self.fives[index])
                progress.add(len(group))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """The Jaccard similarity of the sets of values of two arrays."""
    a, b = np.unique(a), np.unique(b)
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def _deduplicate(prompts: list[Prompt], benchmark_prompts: list[dict], threshold: float, drop) -> list[Prompt]:
    """Drop, from the best rank down, what overlaps a benchmark prompt or repeats a prompt of better rank.

    Near-duplicate: Jaccard similarity of the word 5-gram sets of the whole texts >= threshold. MinHash LSH proposes
    pairs, the sets themselves decide. Prompts of one conversation are no near-duplicates of each other: they share
    their beginning by design, ask for different answers, and are held out together. Prompts of fewer than five words
    are compared as a whole only.
    """
    from datasketch import MinHashLSH

    sketches = Sketches(prompts, benchmark_prompts)
    lsh = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9))  # rather propose too many
    spread = 3 * (threshold * (1 - threshold) / PERMUTATIONS) ** 0.5  # three standard deviations of an estimate

    def near_duplicate(index: int) -> int | None:
        sketch = sketches.minhash[index]
        for other in sorted(lsh.query(sketch)) if sketch else []:
            if (
                prompts[other].conversation is not prompts[index].conversation
                and sketch.jaccard(sketches.minhash[other]) >= threshold - spread  # cheaper than the sets
                and jaccard(sketches.fives[index], sketches.fives[other]) >= threshold
            ):
                return other
        return None

    survivor: dict[bytes, int] = {}
    kept = []
    with Progress(len(prompts), "prompts", "duplicates") as progress:
        for index, prompt in enumerate(prompts):
            if index in sketches.overlaps:
                drop(prompt, "overlaps-benchmark", f"prompt {sketches.overlaps[index]}")
            elif prompt.digest in survivor:
                drop(prompt, "duplicate", f"of {prompts[survivor[prompt.digest]].prompt_id}")
            elif (other := near_duplicate(index)) is not None:
                drop(prompt, "near-duplicate", f"of {prompts[other].prompt_id}")
            else:
                survivor[prompt.digest] = index
                if sketches.minhash[index]:
                    lsh.insert(index, sketches.minhash[index], check_duplication=False)
                kept.append(prompt)
            progress.add(1)
    return kept
