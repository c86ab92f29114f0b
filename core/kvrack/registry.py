"""Entry points -> backends, and every way that can fail.

pluggy's own `load_setuptools_entrypoints` stops at the first broken plugin and drops duplicate
names silently, so entry points are walked here and each plugin is registered by itself: resolving
one name imports one plugin.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvrack import events, hookspecs
from kvrack.backend import Backend, swallows_arguments
from kvrack.errors import (
    BACKEND,
    BackendLoadError,
    DuplicateBackend,
    InvalidPlugin,
    KvrackError,
    MissingDependency,
    UnknownBackend,
)

if TYPE_CHECKING:
    import click

    from kvrack.config import BackendConfig
    from kvrack.events import CacheEvent, Listener

BACKEND_GROUP = "kvrack"
COMMAND_GROUP = "kvrack.commands"
LISTENER_GROUP = "kvrack.listeners"
_KINDS = {BACKEND_GROUP: BACKEND, COMMAND_GROUP: "command", LISTENER_GROUP: "listener"}

logger = logging.getLogger("kvrack.events")


@dataclass(frozen=True)
class BackendInfo:
    """One installed name, as listing shows it.

    Attributes:
        name: the `cache_implementation` string.
        distribution: the distribution(s) that offer it.
        version: their version(s).
        summary: the backend's own line, empty when it could not be loaded.
        error: why it cannot be used, None when it can.
    """

    name: str
    distribution: str
    version: str
    summary: str = ""
    error: KvrackError | None = None


@dataclass(frozen=True)
class Resolved:
    """A backend and its validated config, ready to build layers."""

    backend: Backend
    config: BackendConfig


def installed(group: str = BACKEND_GROUP) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the installed names and the entry points that offer each. Imports no plugin."""
    return _scan(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _scan(group: str, path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    # `path` is the cache's key: a scan reads every distribution's metadata, which takes
    # milliseconds, and its answer can only change with sys.path or with `refresh`.
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry_point in sorted(entry_points(group=group), key=lambda each: (each.name, _provider(each))):
        found[entry_point.name] = (*found.get(entry_point.name, ()), entry_point)
    return found


def refresh() -> None:
    """Forget the scan and what plugins answered, so that distributions installed since are seen."""
    _scan.cache_clear()
    _answer.cache_clear()
    events.forget_plugins()


def _provider(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist is not None else entry_point.value


def distribution_of(name: str) -> tuple[str, str]:
    """Return name and version of the distribution that offers a backend; empty strings where none is known."""
    dists = [each.dist for each in installed().get(name, ()) if each.dist is not None]
    return (dists[0].name, dists[0].version) if dists else ("", "")


def _only_entry_point(name: str, group: str) -> EntryPoint:
    offered = installed(group).get(name, ())
    if not offered:
        from kvrack.config import ALIASES, KNOWN_DISTRIBUTIONS

        raise UnknownBackend(name, list(installed(group)), KNOWN_DISTRIBUTIONS.get(name), list(ALIASES))
    if len(offered) > 1:
        raise DuplicateBackend(name, [_provider(each) for each in offered], _KINDS[group])
    return offered[0]


def _import_plugin(entry_point: EntryPoint) -> ModuleType:
    try:
        return entry_point.load()  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise _module_not_found(entry_point, error) from error
    except (Exception, SystemExit) as error:  # a plugin that exits must not take the listing with it
        raise BackendLoadError(entry_point.name, _provider(entry_point), error, _KINDS[entry_point.group]) from error


def _module_not_found(entry_point: EntryPoint, error: ModuleNotFoundError) -> KvrackError:
    missing = (error.name or "").partition(".")[0]
    own = entry_point.module.partition(".")[0]
    kind = _KINDS[entry_point.group]
    if not missing or missing == own:
        return BackendLoadError(entry_point.name, _provider(entry_point), error, kind)
    declared = entry_point.dist.requires if entry_point.dist is not None else None
    for line in declared or ():
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) == canonicalize_name(missing):
            return MissingDependency(entry_point.name, f"{requirement.name}{requirement.specifier}", kind=kind)
    return MissingDependency(entry_point.name, missing, kind=kind)


def _call_hook(entry_point: EntryPoint, hook: str) -> Any:
    """Import one plugin, check its hooks' signatures, and return what its hook answers."""
    return _answer(entry_point, hook, tuple(sys.path))


@lru_cache(maxsize=256)
def _answer(entry_point: EntryPoint, hook: str, path: tuple[str, ...]) -> Any:
    # Kept as the scan is: a companion is resolved for each layer of a model. What raises isn't kept.
    provider, kind = _provider(entry_point), _KINDS[entry_point.group]
    caller: Callable[..., list[Any]] = getattr(_registered(entry_point).hook, hook)
    try:
        answers = caller(name=entry_point.name)
    except KvrackError:
        raise
    except ModuleNotFoundError as error:
        raise _module_not_found(entry_point, error) from error
    except Exception as error:
        raise BackendLoadError(entry_point.name, provider, error, kind) from error
    if not answers:
        raise InvalidPlugin(entry_point.name, provider, f"it has no {hook} hook that answers to this name", kind)
    return answers[0]


def _registered(entry_point: EntryPoint) -> pluggy.PluginManager:
    """Import one plugin, check its hooks' signatures, and return a manager that has it alone."""
    plugin = _import_plugin(entry_point)
    provider, kind = _provider(entry_point), _KINDS[entry_point.group]
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for attribute in dir(plugin):
        if manager.parse_hookimpl_opts(plugin, attribute) is None:
            continue
        if swallowed := swallows_arguments(getattr(plugin, attribute)):
            raise InvalidPlugin(
                entry_point.name,
                provider,
                f"hook {attribute} swallows arguments ({swallowed}); name each of them",
                kind,
            )
    try:
        manager.register(plugin)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise InvalidPlugin(entry_point.name, provider, str(error).replace("\n", " "), kind) from error
    return manager


def load_backend(name: str) -> Backend:
    """Return the backend of this name, importing that one plugin.

    Raises UnknownBackend, DuplicateBackend, BackendLoadError, MissingDependency or InvalidPlugin.
    """
    entry_point = _only_entry_point(name, BACKEND_GROUP)
    backend = _call_hook(entry_point, "kvrack_backend")
    if not isinstance(backend, Backend):
        raise InvalidPlugin(
            name, _provider(entry_point), f"kvrack_backend returned {type(backend).__name__}, not a Backend"
        )
    if backend.name != name:
        raise InvalidPlugin(
            name, _provider(entry_point), f"kvrack_backend returned the backend {backend.name!r} for this name"
        )
    for requirement in backend.requires:
        _check_requirement(entry_point, requirement)
    return backend


def load_command(name: str) -> click.Command:
    """Return the command-line subcommand of this name, importing that one plugin.

    Raises what `load_backend` raises.
    """
    import click

    entry_point = _only_entry_point(name, COMMAND_GROUP)
    command = _call_hook(entry_point, "kvrack_command")
    if not isinstance(command, click.Command):
        raise InvalidPlugin(
            name,
            _provider(entry_point),
            f"kvrack_command returned {type(command).__name__}, not a click.Command",
            _KINDS[COMMAND_GROUP],
        )
    return command


def load_listeners() -> tuple[Listener, ...]:
    """Return what the installed listener plugins want called with each event.

    Nothing is raised for one that is broken, since no cache needs it: it is logged, and left out.
    """
    found: list[Listener] = []
    for entry_point in (each for offered in installed(LISTENER_GROUP).values() for each in offered):
        try:
            hook = _registered(entry_point).hook.kvrack_cache_event
            if not hook.get_hookimpls():
                kind = _KINDS[LISTENER_GROUP]
                raise InvalidPlugin(entry_point.name, _provider(entry_point), "it has no kvrack_cache_event hook", kind)
        except KvrackError as error:
            logger.warning("%s", error)
        else:
            found.append(_by_keyword(hook))
    return tuple(found)


def _by_keyword(hook: pluggy.HookCaller) -> Listener:
    def tell(event: CacheEvent) -> None:
        hook(event=event)

    return tell


def _check_requirement(entry_point: EntryPoint, text: str) -> None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise InvalidPlugin(
            entry_point.name, _provider(entry_point), f"requires {text!r} is not a requirement: {error}"
        ) from error
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        raise MissingDependency(entry_point.name, text) from None
    if not requirement.specifier.contains(found, prereleases=True):
        raise MissingDependency(entry_point.name, text, found)


def backends() -> dict[str, BackendInfo]:
    """Return every installed name and what is known of it, broken ones with `.error` set.

    Imports each plugin's entry-point module, and so neither torch nor a wrapped library.
    """
    found: dict[str, BackendInfo] = {}
    for name, offered in installed().items():
        dists = [each.dist for each in offered if each.dist is not None]
        distribution = ", ".join(dist.name for dist in dists)
        versions = ", ".join(dist.version for dist in dists)
        try:
            found[name] = BackendInfo(name, distribution, versions, summary=load_backend(name).summary)
        except KvrackError as error:
            found[name] = BackendInfo(name, distribution, versions, error=error)
    return found


def resolve(name: str, config: Mapping[str, Any] | None = None) -> Resolved:
    """Return the backend that `name` (or alias) stands for, and its validated config.

    Args:
        name: a `cache_implementation` string.
        config: a `cache_config`; read, never changed. None means the defaults.

    Raises what `load_backend` raises, and InvalidConfig.
    """
    from kvrack.config import resolve_alias, validate_config

    if not isinstance(name, str):
        raise UnknownBackend(str(name), list(installed()))
    if config is not None and not isinstance(config, Mapping):
        from kvrack.errors import InvalidConfig

        raise InvalidConfig(name, [f"expected a dict of keys, got {type(config).__name__}"])
    target, remaining = resolve_alias(name, config or {})
    backend = load_backend(target)
    return Resolved(backend, validate_config(name, load_config_class(backend), remaining))


def load_config_class(backend: Backend) -> type[BackendConfig]:
    """Return the config class of a loaded backend, importing the module that holds it.

    Raises BackendLoadError, MissingDependency or InvalidPlugin.
    """
    try:
        return backend.config_class()
    except KvrackError:
        raise
    except ModuleNotFoundError as error:
        raise _module_not_found(_only_entry_point(backend.name, BACKEND_GROUP), error) from error
    except Exception as error:
        raise BackendLoadError(
            backend.name, _provider(_only_entry_point(backend.name, BACKEND_GROUP)), error
        ) from error
