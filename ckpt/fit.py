"""How a saved tree is fitted to a template that differs from it on purpose."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.arguments import must_be
from ckpt.errors import Misuse
from ckpt.leaves import ARRAYS, LeafSpec, differences


@dataclass(frozen=True)
class Fit:
    """What may differ between `like` and what was saved; by default nothing.

    All names are leaf paths, such as `params/dense/kernel`.
    """

    partial: Collection[str] | Callable[[str], bool] | None = None
    """Restore only these leaves or subtrees of `like`; the others keep the values `like` has."""
    rename: Mapping[str, str] | Callable[[str], str] | None = None
    """Path in `like` -> path as it was saved.

    A mapping may name leaves and subtrees, and leave others out: {"params": "p"} reads
    `params/dense/kernel` from `p/dense/kernel`. The longest key that fits a leaf counts. A function
    is given the path of each leaf.
    """
    cast: bool | Callable[[str], bool] = False
    """Convert arrays to the dtype in `like` (of NumPy's `astype`) where the saved one differs."""
    missing: Literal["error", "keep"] = "error"
    """A leaf of `like` that was not saved: an error, or it keeps the value `like` has."""
    extra: Literal["error", "ignore"] = "error"
    """A saved leaf that `like` does not have; with `partial` it is always ignored."""

    def __post_init__(self) -> None:
        if self.missing not in ("error", "keep"):
            raise Misuse(f"missing: wanted 'error' or 'keep', found {self.missing!r}")
        if self.extra not in ("error", "ignore"):
            raise Misuse(f"extra: wanted 'error' or 'ignore', found {self.extra!r}")
        if isinstance(self.partial, str):
            raise Misuse(
                f"partial: wanted a collection of leaf paths, found the text {self.partial!r}"
            )
        if self.partial is not None and not callable(self.partial):
            must_be(self.partial, Collection, "partial", "a collection of leaf paths")
            for each in self.partial:
                must_be(each, str, "partial", "leaf paths")
        if self.rename is not None and not callable(self.rename):
            must_be(self.rename, Mapping, "rename", "a mapping of leaf paths, or a function")
            for pair in self.rename.items():
                for each in pair:
                    must_be(each, str, "rename", "leaf paths")
        if not callable(self.cast):
            must_be(self.cast, bool, "cast", "True, False or a function of a leaf path")

    def is_wanted(self, name: str) -> bool:
        """Is a leaf of `like` to be restored?"""
        if self.partial is None:
            return True
        if callable(self.partial):
            return bool(self.partial(name))
        return any(name == each or name.startswith(f"{each}/") for each in self.partial)

    def saved_name(self, name: str) -> str:
        """The name a leaf of `like` was saved under."""
        if self.rename is None:
            return name
        if callable(self.rename):
            renamed = self.rename(name)
            must_be(renamed, str, f"rename: what it gives for {name}", "a leaf path")
            return renamed
        stem = name
        while stem not in self.rename:
            stem = stem.rpartition("/")[0]
            if not stem:
                return name
        return self.rename[stem] + name.removeprefix(stem)

    def may_cast(self, name: str) -> bool:
        """May an array be converted to the dtype in `like`?"""
        return bool(self.cast(name)) if callable(self.cast) else self.cast


EXACT = Fit()


@dataclass(frozen=True)
class Pairing:
    """Which saved leaf goes where."""

    saved: dict[str, LeafSpec]
    """Leaf of `like` -> what was saved for it; absent: it keeps the value in `like`."""
    differences: list[str]
    """What `fit` does not allow, one line each, sorted by leaf name."""


def pair(saved: Sequence[LeafSpec], wanted: Sequence[LeafSpec], fit: Fit = EXACT) -> Pairing:
    """Pair the leaves of a template with those that were saved; pure.

    Raises:
        Misuse: `partial` or `rename` name what is not in `like`, or two leaves are renamed to one.
    """
    if fit == EXACT:
        return Pairing({spec.name: spec for spec in saved}, differences(saved, wanted))
    by_name = {spec.name: spec for spec in saved}
    _refuse_idle(fit, wanted)
    pairs: dict[str, LeafSpec] = {}
    used: dict[str, str] = {}
    lines = []
    for want in wanted:
        if not fit.is_wanted(want.name):
            continue
        name = fit.saved_name(want.name)
        if name in used:
            raise Misuse(f"rename: {used[name]} and {want.name} both come from {name}")
        used[name] = want.name
        found = by_name.get(name)
        if found is None:
            if fit.missing == "error":
                renamed = f" under the name {name}" if name != want.name else ""
                lines.append(f"{want.name}: wanted {want}, found nothing{renamed}")
            continue
        as_named = found._replace(name=want.name)
        if _castable(found, want) and fit.may_cast(want.name):
            as_named = as_named._replace(dtype=want.dtype)
        lines += differences([as_named], [want])
        pairs[want.name] = found
    if fit.extra == "error" and fit.partial is None:
        lines += [
            f"{name}: wanted nothing, found {spec}"
            for name, spec in by_name.items()
            if name not in used
        ]
    return Pairing(pairs, sorted(lines))


def _castable(found: LeafSpec, want: LeafSpec) -> bool:
    return {found.kind, want.kind} <= ARRAYS and found.storage_dtype is not None


def _refuse_idle(fit: Fit, wanted: Sequence[LeafSpec]) -> None:
    """A path that selects nothing is a typing error, and would restore nothing without a word."""
    for what, given in (("partial", fit.partial), ("rename", fit.rename)):
        if given is None or callable(given):
            continue
        for each in given:
            if not any(w.name == each or w.name.startswith(f"{each}/") for w in wanted):
                names = ", ".join(sorted({w.name.split("/")[0] for w in wanted})[:8])
                turned = "; a key is the path in `like`, its value the path as it was saved"
                raise Misuse(
                    f"{what}: {each!r} is no leaf or subtree of `like`; it has {names}"
                    f"{turned if what == 'rename' else ''}"
                )
