"""LD008: all ranks draw the same random numbers."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, calls_of, epoch_of
from ddp_doctor.evidence.requirements import communicating, training_loader
from ddp_doctor.findings import Finding, Verdict, fault, note
from ddp_doctor.records.run import RankRecord
from ddp_doctor.records.spec import OWN

TITLE = "All ranks draw the same random numbers"
CAUSE = """\
All ranks are seeded equally for their initial weights, and go on drawing the same noise, augmentations or time steps:
a global batch has less variety, which no loss shows. Equal dropout masks meet different samples, and are a note.
"""
WRONG = """\
seed_everything(0)    # on all ranks
noise = torch.randn_like(images)    # the same noise on each rank
"""
FIX = """\
Seed by rank after the model is built, in Lightning in `on_fit_start`:
    torch.manual_seed(seed + rank)    # and np.random.seed, random.seed
"""
THREADS = ("huggingface/transformers#31412", "ecmwf/anemoi-core#595")
NEEDS = (communicating, training_loader)
# NumPy and Python do not show where their numbers go. At least one per sample is no choice per batch, which takes a
# few words, as mixup does.
_FEW_WORDS = 16
_GENERATORS = ("torch", "NumPy", "Python", OWN)


def check(evidence: Evidence) -> list[Finding]:
    """Compares the states of all generators on all ranks where they are drawn from."""
    return sorted(_shared(evidence.ranks), key=lambda found: found.verdict is not Verdict.FAULT)[:1]


def _finding(record: RankRecord, generator: str, step: int, what: str, place: str, *, data: bool) -> Finding:
    """Returns the finding of draws of a generator, at its last seed; `data`: they decide which data the ranks see."""
    seeds = [event for event in record.of_kind("seed") if event["step"] <= step and event["generator"] == generator]
    place = [place, *(event["place"] for event in seeds if event["place"])][-1]
    message = f"At step {step}, ranks draw the same random numbers of {generator}: {what}."
    if data:
        return fault(message, step, place=place)
    return note(f"{message} It is not seen that they decide which data a rank gets.", step, place=place)


def _shared(ranks: Sequence[RankRecord]) -> Iterator[Finding]:
    """Yields the draws that two ranks share in more than one step; initial weights must be equal in one."""
    first = ranks[0]
    for other in ranks[1:]:
        pairs = list(_pairs(first, other))
        for generator in _GENERATORS:
            found = _loading(pairs, generator, first), _workers(first, other, generator), _step(pairs, generator, first)
            yield from filter(None, found)


def _pairs(first: RankRecord, other: RankRecord) -> Iterator[tuple[Event, Event]]:
    """Yields the training batches of two ranks that differ, except the last ones, whose steps are not complete.

    Each batch has the state of torch's generator at the next one, which shows whether its step draws.
    """
    batches = [
        {
            (*epoch_of(batch), batch["number"]): batch | {"next": later["generators"]["torch"]}
            for batch, later in pairwise(event for event in rank.of_kind("batch") if event["trains"])
        }
        for rank in (first, other)
    ]
    for key in (key for key in batches[0] if key in batches[1]):
        one, two = batches[0][key], batches[1][key]
        # Ranks that share their samples on purpose share their augmentations, too.
        if one["indices"] != two["indices"] or not one["indices"]:
            yield one, two


def _augments(record: RankRecord, epoch: Event, generator: str) -> bool:
    """Returns whether the data set of an epoch is random, and draws from a generator."""
    calls = calls_of(record, epoch["base"])
    return bool(calls and calls["random"] and generator in calls["generators"])


def _loading(pairs: Sequence[tuple[Event, Event]], generator: str, record: RankRecord) -> Finding | None:
    """Returns the draws with which samples are loaded in this process."""

    def states(batch: Event) -> set[str]:
        if generator == OWN:
            return set(batch.get("own_loading", ()))
        begun = batch["generators"][generator]
        # The first batch also draws for its sampler.
        return {begun} if batch["number"] and begun != batch["at_step"][generator] else set()

    epochs = {epoch_of(epoch): epoch for epoch in record.training_epochs}
    found = [one for one, two in pairs if states(one) & states(two) and epoch_of(one) in epochs]
    # Samplers draw alike on all ranks from a generator of their own, so that these divide one order.
    found = [one for one in found if generator != OWN or _augments(record, epochs[epoch_of(one)], OWN)]
    if len(found) < 2:
        return None
    epoch = epochs[epoch_of(found[0])]
    data = _augments(record, epoch, generator)
    who = f"the {epoch['dataset']}" if data else "the sampler, the stream or the collate_fn"
    what = f"{who} draws them while it loads a batch"
    return _finding(record, generator, found[0]["step"], what, epoch["place"], data=data)


def _workers(first: RankRecord, other: RankRecord, generator: str) -> Finding | None:
    """Returns the draws of workers that begin equally, if the data set draws from this generator."""
    for one, two in zip(first.training_epochs, other.training_epochs, strict=False):
        begun = zip(one["worker_generators"], two["worker_generators"], strict=False)
        if generator == OWN:
            equal = any(set(a.get("own_states", ())) & set(b.get("own_states", ())) for a, b in begun)
        else:
            # If the workers of one rank begin alike, LD007 tells why.
            own = [states[generator] for states in one["worker_generators"]]
            equal = len(set(own)) == len(own) and any(a[generator] == b[generator] for a, b in begun)
        if equal and one["indices"] != two["indices"] and _augments(first, one, generator):
            # PyTorch seeds each worker of a loader from its own generator.
            source = generator if generator == OWN else "torch"
            what = f"the workers of the {one['dataset']} draw from {generator}, so that its augmentations are equal"
            return _finding(first, source, one["step"], what, one["place"], data=True)
    return None


def _step(pairs: Sequence[tuple[Event, Event]], generator: str, record: RankRecord) -> Finding | None:
    """Returns the draws of the steps after the batches."""

    def states(batch: Event) -> dict[str, int]:
        if generator == OWN:
            return dict(batch.get("own_step", {}))
        if generator == "torch":
            draws = batch["drawn"] > 1 and batch["next"] != batch["at_step"]["torch"]
            return {batch["at_step"]["torch"]: batch["drawn"]} if draws else {}
        words = batch["hidden"].get(generator)
        return {batch["at_step"][generator]: words} if words else {}

    known = [(one, states(one), states(two)) for one, two in pairs]
    drawn = [(max(own[state] for state in own.keys() & other), one) for one, own, other in known if own.keys() & other]
    if len(drawn) < 2:
        return None
    if generator == "torch":
        return _of_torch([batch for _, batch in drawn], record)
    words, batch = min(drawn, key=lambda pair: pair[0])
    what = f"the step draws about {words} numbers for the {batch['size']} samples of its batch"
    data = words >= batch["size"] and words > _FEW_WORDS
    return _finding(record, generator, batch["step"], what, batch["place"], data=data)


def _of_torch(drawn: Sequence[Event], record: RankRecord) -> Finding:
    for batch in drawn:
        if into := batch["flows"]:
            what = f"torch.{into[0]['op']} decides which samples or inputs the model gets"
            return _finding(record, "torch", batch["step"], what, into[0]["place"], data=True)
    what = f"the model draws {drawn[0]['drawn']} values, such as those of dropout"
    return _finding(record, "torch", drawn[0]["step"], what, drawn[0]["place"], data=False)
