"""Errors arrive at the other side of the socket as what they were, with what caused them."""

from __future__ import annotations

import builtins
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import errors, messages
from ckpt.errors import CheckpointError, Damaged, Mismatch, NotFound, StoreFailed
from ckpt.messages import Abandon, Failed, Noted

PACKAGE = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, CheckpointError)
]


class Odd(Exception):
    """One that the other side does not know, and that no text can make."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


class OddDisk(OSError):
    pass


class OddStore(StoreFailed):
    pass


def over(error: BaseException) -> BaseException:
    sent = messages.parse(messages.emit(Failed(None, "shared", error)))
    assert isinstance(sent, Failed)
    return sent.error


@pytest.mark.parametrize(
    "kind", [*PACKAGE, MemoryError, ImportError, OSError, RuntimeError, ValueError, KeyError]
)
@given(text=st.text())
def test_an_error_is_what_it_was(kind: type[Exception], text: str) -> None:
    found = over(kind(text))
    assert type(found) is kind
    assert (str(found), found.args) == (str(kind(text)), (text,))
    assert found.__cause__ is None


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Odd(1, 2), Exception, "Odd: (1, 2)"),
        (OddDisk("full"), OSError, "OddDisk: full"),
        (OddStore("down"), StoreFailed, "OddStore: down"),
        (FileNotFoundError(2, "No such file", "x"), FileNotFoundError, "[Errno 2] No such file"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeError, "UnicodeDecodeError: 'utf"),
        (ExceptionGroup("two", [OSError()]), Exception, "ExceptionGroup: two"),
        # These end more than a save where they are raised again.
        (StopIteration("over"), Exception, "StopIteration: over"),
        (KeyboardInterrupt("stop"), CheckpointError, "KeyboardInterrupt: stop"),
        (SystemExit(1), CheckpointError, "SystemExit: 1"),
        (MemoryError(), MemoryError, ""),
    ],
)
def test_another_one_is_the_nearest_that_is_known(
    error: BaseException, kind: type[Exception], text: str
) -> None:
    found = over(error)
    assert type(found) is kind
    assert str(found).startswith(text)


@given(st.text(), st.lists(st.text()))
def test_a_mismatch_keeps_its_differences(text: str, differences: list[str]) -> None:
    error = Mismatch(text, differences)
    found = over(error)
    assert isinstance(found, Mismatch)
    assert (str(found), found.differences) == (str(error), error.differences)


def test_causes_are_carried_in_order_and_not_without_end() -> None:
    error: BaseException = OSError("the disk")
    for text in ("the bucket", "the step"):
        error = chained(StoreFailed(text), error)
    found = over(chained(Damaged("all"), error))
    chain = []
    link: BaseException | None = found
    while link is not None:
        chain.append((type(link), str(link)))
        link = link.__cause__
    step = [(StoreFailed, "the step"), (StoreFailed, "the bucket"), (OSError, "the disk")]
    assert chain == [(Damaged, "all"), *step]

    own = ValueError("its own cause")
    own.__cause__ = own
    found, depth = over(own), 0
    while found.__cause__ is not None:
        found, depth = found.__cause__, depth + 1
    assert depth == 7


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def test_other_messages_carry_errors_alike() -> None:
    sent = messages.parse(messages.emit(Abandon(messages.StepId(1, 1, 1), NotFound("gone"))))
    assert isinstance(sent, Abandon)
    assert isinstance(sent.error, NotFound)
    for error in (MemoryError("full"), None):
        noted = messages.parse(messages.emit(Noted(3, error)))
        assert isinstance(noted, Noted)
        assert type(noted.error) is type(error)


@pytest.mark.parametrize(
    "error", [[], 3, "x", [["NotFound"]], [3], [["NotFound", "x", 3]], [[[], "x", []]], {"a": 1}]
)
def test_what_is_no_error_is_no_message(error: object) -> None:
    line = json.dumps(["Failed", {"id": None, "tier": "", "error": error}]).encode()
    with pytest.raises(Damaged, match="no message between"):
        messages.parse(line)


@pytest.mark.parametrize("kind", ["eval", "BaseException", "SystemExit", "StopIteration", "", "x"])
def test_only_a_known_class_is_made(kind: str) -> None:
    line = json.dumps(["Failed", {"id": None, "tier": "", "error": [[kind, "text", []]]}]).encode()
    found = messages.parse(line)
    assert isinstance(found, Failed)
    assert type(found.error) is CheckpointError
    assert not hasattr(builtins, kind) or messages._ERRORS.get(kind) is None
