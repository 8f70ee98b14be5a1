"""A registry for a family of components: optimizers, adapters, formats, objectives, loggers.

A new member is one file or one function:

    @OPTIMIZERS.register("badam", options=BadamOptions)
    def badam(model, options): ...

Third-party packages register through the entry-point group ``burnish.<family>``, with ``_`` for a space. An entry point
names a module that registers its members when it is imported. Entry points are loaded at the first access to the
registry. One that cannot be loaded is an error with its name and package. See docs/extending.md.
"""

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from burnish.config.errors import UserError, did_you_mean
from burnish.config.options import changed_options, specs

T = TypeVar("T")


@dataclass(frozen=True)
class Member(Generic[T]):
    name: str
    value: T
    options: type | None = None  # dataclass of options that this member reads
    summary: str = ""
    when: Callable[[Any], bool] | None = None  # true for options that select this member without its name
    metadata: Mapping[str, Any] = field(default_factory=dict)  # further properties that the family reads
    module: str = "burnish"  # name of the module that registered it

    @property
    def is_ours(self) -> bool:
        """Whether burnish registered it, rather than another package."""
        return self.module.partition(".")[0] == "burnish"


class Registry(Generic[T]):
    """Name -> member and its option group.

    Args:
        family: singular name for error messages: "optimizer".
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self._members: dict[str, Member[T]] = {}
        self._looked_for_plugins = False

    def register(
        self, *names: str, options: type | None = None, when: Callable[[Any], bool] | None = None,
        replace: bool = False, **metadata: Any,
    ) -> Callable[[T], T]:  # fmt: skip
        """Decorator: add a member under one or more names. Raises ValueError if a name is taken, unless ``replace`` is
        true.
        """
        module = str(sys._getframe(1).f_globals.get("__name__", ""))
        if options is not None and not is_dataclass(options):
            raise TypeError(f"the options of {self.family} {names[0]!r} must be a dataclass. Received: {options!r}")

        def add(value: T) -> T:
            for name in names:
                if name in self._members and not replace:
                    raise ValueError(f"{self.family} {name!r} is already registered by {self._members[name].module}")
                self._members[name] = Member(name, value, options, _first_line(value), when, metadata, module)
            return value

        return add

    def get(self, name: str) -> Member[T]:
        """The member of that name. Raises UserError with similar names if it does not exist."""
        if name not in self:
            known = sorted(self.names())
            raise UserError(
                f'Unknown {self.family} "{name}".{did_you_mean(name, known)}', remedy=f"Available: {', '.join(known)}."
            )
        return self._members[name]

    def choose(self, name: str, options: object) -> Member[T]:
        """The member selected by ``options``: one whose ``when`` is true, else the one named ``name``."""
        return next((member for member in self if member.when is not None and member.when(options)), None) or self.get(
            name
        )

    def __getitem__(self, name: str) -> T:
        return self.get(name).value

    def __contains__(self, name: str) -> bool:
        self._load_plugins()
        return name in self._members

    def __iter__(self) -> Iterator[Member[T]]:
        self._load_plugins()
        return iter(self._members.values())

    def names(self) -> list[str]:
        """The names that can be chosen. Members with the trait ``refused`` exist only to explain why they are not
        supported.
        """
        return [member.name for member in self if "refused" not in member.metadata]

    def option_groups(self) -> list[type]:
        """The option groups of all members without duplicates, in order of registration."""
        return list(dict.fromkeys(member.options for member in self if member.options is not None))

    def unread(self, chosen: Member[T], options: object) -> list[str]:
        """Changed options that other members of the family read and the chosen one does not."""
        of_others = {name for group in self.option_groups() if group is not chosen.options for name in specs(group)}
        return [name for name in changed_options(options) if name in of_others]

    def _load_plugins(self) -> None:
        if self._looked_for_plugins:
            return
        self._looked_for_plugins = True
        for point in entry_points(group=f"burnish.{self.family.replace(' ', '_')}"):
            try:
                point.load()
            except Exception as error:  # any error of the package's own code
                package = point.dist.name if point.dist is not None else "a package"
                library = error.name if isinstance(error, ModuleNotFoundError) and error.name != point.module else None
                install = f"Install {library}, or update" if library else "Update"
                raise UserError(
                    f"the entry point {point.name} = {point.value} cannot be loaded: {_reason(error)}.",
                    where=package,
                    remedy=f"{install} or uninstall {package}, which declares this entry point of {point.group}.",
                ) from error


def _reason(error: Exception) -> str:
    """Return the message of an error that an import raised, with file and line."""
    known = isinstance(error, ImportError | SyntaxError | ValueError)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def _first_line(value: object) -> str:
    return (getattr(value, "__doc__", None) or "").strip().split("\n")[0]
