"""Check errors by their class, their kind and the values that they name, so that tests do not depend on the wording."""

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from longtail.errors import Kind, UserError


@contextlib.contextmanager
def raises(
    kind: Kind, *values: object, error: type[UserError] = UserError
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect an error of this kind whose message contains the values."""
    with pytest.raises(error) as caught:
        yield caught
    found = caught.value
    assert found.kind == kind, f"{found.kind}: {found}"
    for value in map(str, values):
        assert value in str(found), f"{value!r} is not in: {found}"


def fails(capsys, args: Sequence[str], kind: Kind, *values: object, code: int = 2) -> str:
    """Run a command that must fail with this exit code, this kind of error and one line that contains the values.

    The command runs twice: the second time its exception is caught. Return the line.
    """
    from longtail.cli import main, run  # imported here, because a machine for GPU tests may lack them

    capsys.readouterr()
    assert main(args) == code
    line = capsys.readouterr().err
    assert line.startswith("longtail: ") and line.count("\n") == 1, line
    for value in map(str, values):
        assert value in line, f"{value!r} is not in: {line}"
    with raises(kind, *values) as caught:
        run(list(args))
    assert caught.value.exit_code == code
    return line
