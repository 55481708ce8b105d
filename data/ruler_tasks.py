"""RULER's 13 tasks (arXiv 2404.06654), drawn as NVIDIA/RULER draws them: the same random numbers
in the same order give the same samples. Pure: words, essays and documents come from data/ruler.py.

A sample is made of a number of units (noise lines, essay words, distractors, words, documents). The
largest number that fits is searched for once; a sample that comes out too long loses a step of
units and is drawn anew. Every draw moves the random stream, also those of the search.
"""

import math
import random
import re
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, pairwise
from typing import Any, Literal

import numpy as np

from nanorove.errors import UserError

STANDARD = 4096  # below it RULER takes smaller steps and other word counts: variants of the tasks
LONGEST = 131_072  # the longest that RULER reports, and what the essays reach
REDRAWS = 100  # at the smallest size, before a length counts as too short

# The prompts are data: every character counts.
NIAH = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n{context}\n"
    "What are all the special magic {type} for {query} mentioned in the provided text?"
)
NIAH_PREFIX = " The special magic {type} for {query} mentioned in the provided text are"
NEEDLE = "One of the special magic {type} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above."
)
VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are "
    "assigned the value {query}, they are: "
)
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
FWE_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
QA = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question "
    "based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}"
)
QA_PREFIX = " Answer:"

DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent of the essay, where needles may lie

Count = Callable[[str], int]  # tokens of a text


class NotPossible(UserError):
    """A task cannot be made at this length, or without a file; others can."""


@dataclass(frozen=True)
class Sample:
    """One question. What a model reads is `prompt`; `control` is the same without the context,
    demonstrations kept."""

    input: str
    answer_prefix: str
    outputs: list[str]
    control: str
    answer_at: int | None
    """Character of `input` where the first of `outputs` stands; None if there is no one place."""

    @property
    def prompt(self) -> str:
        return self.input + self.answer_prefix


def ask(
    template: str,
    prefix: str,
    context: str,
    outputs: list[str],
    *,
    before: str = "",
    holder: str | None = None,
    **fill: str,
) -> Sample:
    """The sample of a filled-in template. `before` is a demonstration, `holder` the piece of the
    context in which the first of `outputs` stands."""
    text, prefix = before + template.format(context=context, **fill), prefix.format(**fill)
    return Sample(
        input=text,
        answer_prefix=prefix,
        outputs=outputs,
        control=before + template.format(context="", **fill) + prefix,
        answer_at=holder and text.index(holder, len(before)) + holder.index(outputs[0]),
    )


@dataclass(frozen=True)
class Question:
    """A question about documents, which are given as indices into Documents.texts."""

    query: str
    outputs: list[str]
    context: list[int]
    """Documents that are always in the prompt."""
    more: list[int]
    """Documents of the same article, taken before any others."""
    gold: list[int]
    """Those of `context` that hold the answer."""


@dataclass(frozen=True)
class Documents:
    """A set of questions and the documents they draw on."""

    questions: list[Question]
    texts: list[str]


class WordPairs(Sequence[str]):
    """All "adjective-noun", sorted and without doubles, as a list would be; but none of the 6
    million strings is made before it is asked for."""

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        nouns = sorted(set(nouns))
        # "blue-" begins "blue-eyed-" too, so the pairs of such adjectives are sorted together;
        # otherwise the adjective alone decides the order
        groups: list[list[str]] = []
        for head in sorted({adjective + "-" for adjective in adjectives}):
            if groups and head.startswith(groups[-1][0]):
                groups[-1].append(head)
            else:
                groups.append([head])
        self.nouns = nouns
        self.groups: list[str | list[str]] = [
            heads[0]
            if len(heads) == 1
            else sorted({head + noun for head in heads for noun in nouns})
            for heads in groups
        ]
        sizes = (len(nouns) if isinstance(group, str) else len(group) for group in self.groups)
        self.starts = list(accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self.starts, index) - 1
        group, index = self.groups[number], index - self.starts[number]
        return group + self.nouns[index] if isinstance(group, str) else group[index]


class Generator:
    """Draws the samples of one task at one length; `seed` decides all of them.

    Raises UserError for a length outside 1..LONGEST, and NotPossible, as soon as a sample is asked
    for, where NVIDIA's code would draw for ever (NVIDIA/RULER#5, lm-evaluation-harness#2963).
    """

    tokens_to_generate: int
    metric: Literal["all", "part"] = "all"
    step: int  # units that a sample loses when it is too long
    probe: int  # units of the draw that tells how many tokens a unit takes
    fewest = 1  # units that make sense
    shot_tokens = 0  # of a demonstration that the draws of the search leave out

    def __init__(self, name: str, length: int, seed: int, count: Count) -> None:
        if not 1 <= length <= LONGEST:
            raise UserError(
                f"a RULER length is within 1..{LONGEST:,} tokens, not {length:,}: the essays and "
                "word lists reach no further"
            )
        self.name, self.length, self.seed, self.count = name, length, seed, count
        self.random = random.Random(seed)
        self.size = 0  # the units that fit, once samples() has searched

    def samples(self, number: int) -> Iterator[Sample]:
        """Search the size, then draw samples 0 ... number - 1, each at most `length` tokens with
        those to generate."""
        room = self.length - self.tokens_to_generate - self.shot_tokens
        self.size = largest_size(self.search_tokens, room, self.step, self.probe, self.most_units)
        for index in range(number):
            yield self.fitted(index)

    def draw(self, size: int, index: int) -> Sample:
        """One draw of sample `index`, of `size` units."""
        raise NotImplementedError

    def smallest(self, index: int) -> int:
        """The fewest units of sample `index` that make sense."""
        return self.fewest

    def search_tokens(self, size: int) -> int:
        """Tokens of one draw, in the search."""
        return self.count(self.draw(size, 0).prompt)

    def most_units(self, tokens_per_unit: float) -> int:
        """Where the search ends: three times the estimate."""
        return int(self.length / tokens_per_unit * 3)

    def fitted(self, index: int) -> Sample:
        """The first draw of sample `index` that fits. What is too long loses a step of units, down
        to one step; what is too long then is only drawn again, in the hope of shorter words."""
        smallest = self.smallest(index)
        size, longest = max(self.size, smallest), 0
        for _ in range(REDRAWS + size // self.step):
            sample = self.draw(size, index)
            tokens = self.count(sample.prompt) + self.tokens_to_generate
            if tokens <= self.length:
                return sample
            if size > max(self.step, smallest):
                size = max(size - self.step, smallest)
            else:
                longest = max(longest, tokens)
        raise self.too_short(longest)

    def too_short(self, needed: int) -> NotPossible:
        """The one line for a length that is too short."""
        return NotPossible(
            f"task {self.name} does not fit in {self.length:,} tokens; the shortest that works is "
            f"about {needed:,}"
        )


def largest_size(
    tokens: Callable[[int], int],
    room: int,
    step: int,
    probe: int,
    most: Callable[[float], int],
) -> int:
    """The most units whose draw takes at most `room` tokens, by bisection between `step` and
    most(tokens per unit); `step` if none does. `tokens(size)` draws, so the order of calls counts.
    """
    low, high, best = step, max(most(tokens(probe) / probe), 2 * step), step
    while low <= high:
        middle = (low + high) // 2
        if tokens(middle) <= room:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


class Niah(Generator):
    """A needle in a haystack: special numbers or uuids for keys, between lines of noise, essay
    sentences or needles that nobody asks for."""

    tokens_to_generate = 128

    def __init__(
        self,
        name: str,
        length: int,
        seed: int,
        count: Count,
        *,
        pairs: Sequence[str],
        essay: Sequence[str] = (),
        haystack: Literal["noise", "essay", "needle"],
        key: Literal["words", "uuids"] = "words",
        value: Literal["numbers", "uuids"] = "numbers",
        keys: int = 1,
        values: int = 1,
        queries: int = 1,
    ) -> None:
        super().__init__(name, length, seed, count)
        self.pairs, self.essay, self.haystack = pairs, essay, haystack
        self.key, self.value = key, value
        self.keys, self.values, self.queries = max(keys, queries), values, queries
        self.step = self.probe = 500 if haystack == "essay" else 25 if length >= STANDARD else 5
        self.template, self.prefix, self.type = NIAH, NIAH_PREFIX, value
        if values * queries == 1:
            self.template, self.prefix = singular(NIAH), singular(NIAH_PREFIX)
            self.type = value.removesuffix("s")

    def draw(self, size: int, index: int) -> Sample:
        keys, values = [], []
        for _ in range(self.keys):
            keys.append(self.something(self.key))
            values.append([self.something(self.value) for _ in range(self.values)])
        needles = [self.needle(k, v) for k, vs in zip(keys, values, strict=True) for v in vs]
        random.Random(self.seed).shuffle(needles)
        context = self.in_essay(needles, size) if self.essay else self.in_lines(needles, size)
        asked = self.random.sample(range(self.keys), self.queries)
        outputs = [value for i in asked for value in values[i]]
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]
        return ask(
            self.template,
            self.prefix,
            context,
            outputs,
            holder=self.needle(names[0], outputs[0]),
            type=self.type,
            query=query,
        )

    def needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type=self.value, key=key, value=value)

    def something(self, kind: str) -> str:
        """A random key or value."""
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        if kind == "words":
            return self.random.choice(self.pairs)
        return uuid4(self.random)

    def in_lines(self, needles: list[str], size: int) -> str:
        """`size` lines of noise, or of needles nobody asks for, and the needles between them."""
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [
                self.needle(self.something(self.key), self.something(self.value))
                for _ in range(size)
            ]
        places = sorted(self.random.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def in_essay(self, needles: list[str], size: int) -> str:
        """The first `size` words of the essays (again and again if there are no more), and the
        needles between their sentences."""
        found = sentences(" ".join(islice(cycle(self.essay), size)))
        depths = self.random.sample(DEPTHS, len(needles))
        places = [0, *sorted(int(len(found) * (depth / 100)) for depth in depths), len(found)]
        parts = [" ".join(found[places[0] : places[1]])]
        for needle, start, end in zip(needles, places[1:-1], places[2:], strict=True):
            parts += [needle, " ".join(found[start:end])]
        return " ".join(parts)


def singular(template: str) -> str:
    """NIAH's wording for one answer."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def uuid4(rng: random.Random) -> str:
    """A version-4 uuid from 128 random bits."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def sentences(text: str) -> list[str]:
    """Text cut at the spaces behind . ! and ?. RULER uses NLTK's punkt, which is a download of its
    own and knows abbreviations; only the places of needles in essays depend on it."""
    return re.split(r"(?<=[.!?])\s+", text.strip())


class VariableTracking(Generator):
    """Five variables that share one value, each assigned from the one before, between lines of
    noise. A short demonstration comes first, with new names and a new value in every sample."""

    tokens_to_generate = 30
    fewest = 5

    def __init__(
        self, name: str, length: int, seed: int, count: Count, *, shot_tokens: int = 500
    ) -> None:
        super().__init__(name, length, seed, count)
        self.numbers = np.random.RandomState(seed)
        self.step = self.probe = 10 if length >= STANDARD else 5
        (shot,) = Demonstration(name, shot_tokens, seed, count, self.random).samples(1)
        self.shot_names = shot.outputs
        self.shot = shot.prompt + " " + " ".join(shot.outputs) + "\n"
        self.shot_tokens = count(self.shot)

    def chain(self, size: int) -> dict[str, Any]:
        return chain(self.random, size, 5, lambda: self.numbers.randint(10000, 99999))

    def search_tokens(self, size: int) -> int:
        return self.count(ask(VT, VT_PREFIX, **self.chain(size)).prompt)

    def draw(self, size: int, index: int) -> Sample:
        drawn, shot = self.chain(size), self.shot
        for name in self.shot_names:
            shot = shot.replace(name, letters(self.random, string.ascii_uppercase, 3))
        shot = shot.replace("12345", str(self.numbers.randint(10000, 99999)))
        return ask(VT, VT_PREFIX, before=shot + "\n", **drawn)


class Demonstration(Generator):
    """What stands before every sample of vt: a chain with three-letter names."""

    tokens_to_generate = 0
    step = probe = fewest = 5

    def __init__(
        self, name: str, length: int, seed: int, count: Count, stream: random.Random
    ) -> None:
        super().__init__(name, length, seed, count)
        self.random = stream

    def draw(self, size: int, index: int) -> Sample:
        return ask(VT, VT_PREFIX, **chain(self.random, size, 3, lambda: 12345))


def chain(
    rng: random.Random, size: int, name_letters: int, value: Callable[[], int]
) -> dict[str, Any]:
    """What ask() needs of a chain of five variables among `size` lines of noise."""
    names: list[str] = []
    while len(names) < 5:
        name = letters(rng, string.ascii_uppercase, name_letters)
        if name not in names:
            names.append(name)
    first = str(value())
    assignments = [f"VAR {names[0]} = {first}"]
    assignments += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
    lines = [NOISE] * size
    places = sorted(rng.sample(range(size), len(assignments)))
    for i, (place, line) in enumerate(zip(places, assignments, strict=True)):
        lines.insert(place + i, line)
    context = "\n".join(lines)
    return {"context": context, "outputs": names, "query": first, "holder": assignments[0]}


def letters(rng: random.Random, alphabet: str, number: int) -> str:
    return "".join(rng.choices(alphabet, k=number))


class CommonWords(Generator):
    """A numbered list in which ten words come more often than the others, behind a short
    demonstration."""

    tokens_to_generate = 120
    step = fewest = 10
    probe = 4096

    def __init__(
        self, name: str, length: int, seed: int, count: Count, *, words: Sequence[str]
    ) -> None:
        super().__init__(name, length, seed, count)
        self.words = sorted(words)
        random.Random(seed).shuffle(self.words)

    def draw(self, size: int, index: int) -> Sample:
        if size > len(self.words):  # if all goes well the second size of the search, 3/4 of `most`
            longest = int(self.length * len(self.words) / (0.75 * self.most))
            raise NotPossible(
                f"task {self.name} takes more words at {self.length:,} tokens than the "
                f"{len(self.words):,} there are; the longest that works is about {longest:,}"
            )
        # words of the demonstration, how often its common and its other words come; the same of
        # the question
        counts = (40, 10, 3, 30, 3) if self.length >= STANDARD else (20, 3, 1, 6, 1)
        listed, common = self.word_list(*counts[:3])
        shot = CWE.format(context=listed) + CWE_PREFIX + " " + numbered(common) + "\n"
        return ask(CWE, CWE_PREFIX, *self.word_list(size, *counts[3:]), before=shot)

    def most_units(self, tokens_per_unit: float) -> int:
        self.most = int(self.length // tokens_per_unit) * 2
        return self.most

    def word_list(self, size: int, common_times: int, other_times: int) -> tuple[str, list[str]]:
        """`size` words as a numbered list, and the ten of them that come more often."""
        words = self.random.sample(self.words, size)
        listed = words[:10] * common_times + words[10:] * other_times
        random.Random(self.seed).shuffle(listed)
        return numbered(listed), words[:10]


def numbered(words: Sequence[str]) -> str:
    """1. and 2. so 3. on"""
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


class FrequentWords(Generator):
    """Coded words whose counts follow a zeta distribution; asked for are ranks 2 to 4, since dots
    stand for the first."""

    tokens_to_generate = 50
    fewest = 30  # with less, ranks 2 to 4 do not differ

    def samples(self, number: int) -> Iterator[Sample]:
        room = self.length - self.tokens_to_generate
        self.words, self.step = room // 50, room // 32
        if self.words < 4:  # the dots and three to ask for
            self.words = 4
            needed = self.needed(self.vocabulary(), self.fewest)
            raise self.too_short(max(self.tokens_to_generate + 4 * 50, needed))
        words, self.size = self.vocabulary(), room // 6
        while self.needed(words, self.size) < self.length:
            self.size += self.step
        self.size -= self.step
        for _ in range(number):
            words, size = self.vocabulary(), max(self.size, self.fewest)
            while self.needed(words, size) > self.length or not self.ranked(size):
                if size == self.fewest:
                    raise self.too_short(self.needed(words, size))
                size = max(size - self.step, self.fewest)
            yield self.sample(words, size)

    def needed(self, words: list[str], size: int) -> int:
        """Tokens of prompt and answer."""
        return self.count(self.sample(words, size).prompt) + self.tokens_to_generate

    def vocabulary(self) -> list[str]:
        """Random words of six letters, the most frequent first."""
        words: set[str] = set()
        while len(words) < self.words:
            words.add(letters(self.random, string.ascii_lowercase, 6))
        ranked = sorted(words)
        random.Random(self.seed).shuffle(ranked)
        return ["...", *ranked[1:]]

    def counts(self, size: int) -> np.ndarray:
        """How often each of the words comes, of about `size` in all: (words,) integers."""
        ranks = np.arange(1, self.words + 1)
        return (size * ranks**-2.0 / (math.pi**2 / 6)).astype(int)

    def ranked(self, size: int) -> bool:
        """Whether ranks 2 to 4 differ from each other and from the rest."""
        return bool((np.diff(self.counts(size)[1:5]) < 0).all())

    def sample(self, words: list[str], size: int) -> Sample:
        listed = [w for w, n in zip(words, self.counts(size), strict=True) for _ in range(n)]
        random.Random(self.seed).shuffle(listed)
        return ask(FWE, FWE_PREFIX, " ".join(listed), words[1:4])


class DocumentQuestions(Generator):
    """A question, the documents that answer it, and others. They are shuffled alike in every sample
    of as many documents, so the answer lies at about one depth; `any_depth` shuffles anew."""

    tokens_to_generate = 32
    metric = "part"
    step = probe = 10

    def __init__(
        self,
        name: str,
        length: int,
        seed: int,
        count: Count,
        *,
        documents: Documents,
        any_depth: bool = False,
    ) -> None:
        super().__init__(name, length, seed, count)
        self.questions, self.texts = documents.questions, documents.texts
        self.any_depth = any_depth

    def samples(self, number: int) -> Iterator[Sample]:
        if number > len(self.questions):
            raise UserError(
                f"task {self.name}: {len(self.questions):,} questions are there, fewer than the "
                f"{number:,} samples asked; lower --samples"
            )
        return super().samples(number)

    def smallest(self, index: int) -> int:
        return len(self.questions[index].context)

    def draw(self, size: int, index: int) -> Sample:
        question = self.questions[index]
        chosen = self.choose(question, max(size, self.smallest(index)))
        seed = f"{self.seed} {index}" if self.any_depth else self.seed
        random.Random(seed).shuffle(chosen)
        context = "\n\n".join(
            f"Document {i}:\n{self.texts[d]}" for i, d in enumerate(chosen, start=1)
        )
        answer = question.outputs[0]
        golden = (self.texts[d] for d in chosen if d in question.gold and answer in self.texts[d])
        holder, query = next(golden, None), question.query
        return ask(QA, QA_PREFIX, context, question.outputs, holder=holder, query=query)

    def choose(self, question: Question, size: int) -> list[int]:
        """`size` documents: those of the question, then of the same article, then any."""
        if size >= len(self.texts):  # all of them, again and again
            return list(islice(cycle(range(len(self.texts))), size))
        others = size - len(question.context)
        if others <= len(question.more):
            return question.context + self.random.sample(question.more, others)
        known = {*question.context, *question.more}
        rest = [d for d in range(len(self.texts)) if d not in known]
        chosen = self.random.sample(rest, max(0, others - len(question.more)))
        return question.context + question.more + chosen
