"""ServedVersions: the versions of one model that are served at the same time, by policy, label and share of requests.

    policy     which versions are loaded: the latest N, all, or given ones; those that have a label, always
    labels     names of versions, as stable and canary
    split      shares of the requests that name neither a version nor a label, as 0.95 stable, 0.05 canary

A rollback moves a label, or sets the policy to an older version. A change takes effect as a whole, or not at all: the
versions that it needs are mapped and checked first.

Threads: any. A request takes one version once. Changes and reloads are serialised by a lock.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import structs

from shoal.base.decoders import json_decoder
from shoal.base.scalars import whole
from shoal.data import hash_strings
from shoal.errors import CorruptionError, ShoalError
from shoal.export import manifest as manifests
from shoal.export.read import ExportFolder
from shoal.serve.reloadable import Reloadable
from shoal.serve.served import Model, ServedModel
from shoal.storage.base import StorageDir
from shoal.storage.open import open_dir

_log = logging.getLogger(__name__)


class UnknownVersionError(ValueError):
    """A request names a version or a label that is not served."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Which versions of a model are served, and how requests are shared among them.

    Attributes
    ----------
    latest : int
        Number of the highest versions that are served; ignored if ``versions`` is given.
    versions : "all" or tuple of int, optional
        All versions, or these.
    labels : dict of str to int
        Versions by label, which are also served.
    split : dict of str to float
        Shares of the requests by label, which sum to 1; without it all go to the highest version.

    Raises
    ------
    ValueError
        ``latest`` is below 1, ``versions`` is empty, or the shares are not positive, do not sum to 1, or name an
        unknown label.
    """

    latest: int = 1
    versions: Literal["all"] | tuple[int, ...] | None = None
    labels: dict[str, int] = msgspec.field(default_factory=dict)
    split: dict[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        whole("latest", self.latest, 1, "the number of versions, 1 or more")
        if isinstance(self.versions, str | None):
            if self.versions not in ("all", None):
                raise ValueError(f"versions is {self.versions!r}: pass 'all', or numbers of versions")
        elif len(numbers := _numbers_of(self.versions)) == 0:
            raise ValueError("versions is empty: pass numbers of versions, or leave it out")
        else:
            structs.force_setattr(self, "versions", numbers)
        for what, given in (("labels", self.labels), ("split", self.split)):
            if not isinstance(given, Mapping):
                raise TypeError(f"{what} is {given!r:.80}: pass a mapping of labels")
        for label, number in self.labels.items():
            if not isinstance(label, str) or not label or "/" in label:
                raise ValueError(f"label {label!r}: pass a name without a slash")
            whole(f"label {label!r}", number, 0, "the number of a version")
        for label, share in self.split.items():
            if label not in self.labels:
                raise ValueError(
                    f"the split names {label!r}, which is not a label: the labels are {_listed(self.labels)}"
                )
            if isinstance(share, bool) or not isinstance(share, int | float):
                raise TypeError(f"the share of {label} is {share!r:.80}: pass a number above 0, at most 1")
            if not 0 < share <= 1:
                raise ValueError(f"the share of {label} is {share}: pass a number above 0, at most 1")
        if self.split and abs(sum(self.split.values()) - 1) > 1e-9:
            raise ValueError(f"the shares of the split sum to {sum(self.split.values()):g}: they must sum to 1")

    def chosen(self, there: list[int]) -> list[int]:
        """Return the versions to serve, of those that are there, ascending."""
        if self.versions == "all":
            wanted = set(there)
        elif self.versions is not None:
            wanted = set(self.versions)
        else:
            wanted = set(sorted(there)[-self.latest :])
        return sorted(wanted | set(self.labels.values()))

    def names(self, number: int) -> bool:
        """Return whether a version must be served: it has a label, or is one of the given versions."""
        return number in self.labels.values() or (isinstance(self.versions, tuple) and number in self.versions)


def _numbers_of(versions: Any) -> tuple[int, ...]:
    if not isinstance(versions, tuple | list):
        raise TypeError(f"versions is {versions!r:.80}: pass 'all', or a tuple of numbers of versions")
    return tuple(whole("a version", one) for one in versions)


def _checked(settings: Any) -> Settings:
    if not isinstance(settings, Settings):
        raise TypeError(f"settings are a {type(settings).__name__}: pass shoal.serve.Settings(latest=1)")
    return settings


def parse_policy(text: str) -> dict[str, Any]:
    """Read latest, latest:2, all, or numbers as 3,5; the result is of `Settings`."""
    name, colon, number = text.partition(":")
    if text == "all":
        return {"versions": "all"}
    if name == "latest" and (not colon or (number.isascii() and number.isdigit())):
        return {"latest": int(number) if colon else 1}
    words = text.split(",")
    if all(word.isascii() and word.isdigit() for word in words):
        return {"versions": tuple(map(int, words))}
    raise ValueError(f"{text!r} is not a policy: write latest, latest:N, all, or numbers of versions such as 3,5")


def _listed(labels: Mapping[str, int]) -> str:
    return ", ".join(labels) or "none"


class _State(msgspec.Struct, frozen=True, eq=False):
    """The settings and the loaded versions; immutable, so that a request sees one of them."""

    settings: Settings
    served: dict[int, ServedModel]

    def close(self, *, but: _State | None = None) -> None:
        """Close the versions, but for those that are of another state, too."""
        kept = [] if but is None else list(but.served.values())
        for served in self.served.values():
            if served not in kept:
                served.close()


class ServedVersions(Reloadable):
    """The served versions of one model. A context manager that closes itself.

    Parameters
    ----------
    directory : path or URL
        An export of a model, or a directory of them.
    settings : Settings, optional
        Default: the latest version.
    threads, verify, cache, storage_options
        As for `ServedModel`.
    draw : callable, optional
        Returns a number in [0, 1) for a request without a routing key.

    Raises
    ------
    CorruptionError, StorageError
        A version that the settings name is missing or damaged.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        settings: Settings | None = None,
        *,
        threads: int | None = 1,
        verify: bool = True,
        cache: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        super().__init__()
        self._directory: StorageDir = open_dir(directory, storage_options)
        self._folder = ExportFolder(self._directory)
        self._how: dict[str, Any] = {"threads": threads, "verify": verify, "cache": cache}
        self._draw = draw
        self._state, errors = self._loaded(Settings() if settings is None else _checked(settings), {})
        self._folder.ignore_damage(errors)

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self._state.settings

    @property
    def models(self) -> list[Model]:
        """The models of the loaded versions, ascending."""
        return [served.now for _, served in sorted(self._state.served.items())]

    @property
    def now(self) -> Model:
        """The model of the highest loaded version."""
        return self.models[-1]

    def choose(self, *, version: int | None = None, label: str | None = None, key: str | None = None) -> Model:
        """Return the model that answers a request.

        Parameters
        ----------
        version, label : optional
            The version, or its label. Default: by the split, or the highest version.
        key : str, optional
            A routing key, such as a user's id: requests with the same key get the same version while the split is the
            same.

        Raises
        ------
        UnknownVersionError
            There is no such label, or the version is not loaded.
        """
        state = self._state  # one of them throughout
        if label is None and version is None and state.settings.split:
            label = _of_split(state.settings.split, self._draw() if key is None else _number_of(key))
        if label is not None:
            if label not in state.settings.labels:
                labels = _listed(state.settings.labels)
                raise UnknownVersionError(f"there is no label {label!r}: the labels are {labels}")
            version = state.settings.labels[label]
        if version is None:
            version = max(state.served)
        if version not in state.served:
            loaded = ", ".join(map(str, sorted(state.served)))
            raise UnknownVersionError(f"version {version} is not served: the versions are {loaded}")
        return state.served[version].now

    # ---- changes -----------------------------------------------------------------------------------------------------

    def change(self, settings: Settings) -> None:
        """Serve by other settings, once all versions that they name are loaded.

        Raises
        ------
        CorruptionError, StorageError, ValueError
            A version is missing or damaged. Nothing has changed.
        """
        with self._change():
            state, errors = self._loaded(_checked(settings), self._state.served)
            if errors:
                state.close(but=self._state)
                raise errors[0]
            self._swap(state)
            _log.info("%s: %s", self._directory, settings)

    def reload(self) -> bool:
        """Check for versions that are new or replaced.

        Returns
        -------
        bool
            Whether there are other versions than before.

        Raises
        ------
        CorruptionError, StorageError, ValueError
            A version cannot be used; the others are served.
        """
        with self._change():
            before = self._state
            try:
                state, errors = self._loaded(before.settings, before.served)
            except Exception as error:
                state, errors = before, [error]
            self._swap(state)
            if state.served != before.served:
                numbers = ", ".join(map(str, sorted(state.served)))
                self._has_reloaded("%s: versions %s are served", self._directory, numbers)
            if errors := [*errors, *self._folder.damage()]:
                self._has_failed(f"{self._directory}: the versions are", errors[0])
                raise errors[0]
            self._failure = ""
            return state.served != before.served

    def _release(self) -> None:
        self._state.close()

    def _swap(self, state: _State) -> None:
        before, self._state = self._state, state
        self.changed()
        before.close(but=state)  # requests that a version answers hold its files

    def _loaded(self, settings: Settings, known: Mapping[int, ServedModel]) -> tuple[_State, list[Exception]]:
        """Open the versions of the settings; of ``known`` ones those that are other exports now."""
        exports = self._folder.read()
        state = _State(settings, {})
        errors: list[Exception] = []
        usable = set(exports)
        try:
            while missing := [number for number in settings.chosen(list(usable)) if number not in state.served]:
                for number in missing:
                    try:
                        state.served[number] = self._opened(number, exports, known.get(number))
                    except Exception as error:
                        errors.append(error)
                        if number in known:
                            state.served[number] = known[number]
                        elif number in usable and not settings.names(number):
                            usable.remove(number)
                        else:
                            raise
            if not state.served:
                raise errors[0]
        except BaseException:
            state.close(but=_State(settings, dict(known)))
            raise
        return state, errors

    def _opened(
        self, number: int, exports: Mapping[int, manifests.Copies | CorruptionError], known: ServedModel | None
    ) -> ServedModel:
        """Open a version, unless it is known."""
        copies = exports.get(number)
        if isinstance(copies, ShoalError):
            raise copies
        if known is not None and (copies is None or known.is_of(copies)):
            return known
        if copies is None:
            there = ", ".join(map(str, sorted(exports)))
            raise CorruptionError(f"{self._directory} has no version {number}: there are {there}")
        return ServedModel(copies.directories[-1], **self._how)  # type: ignore[arg-type]


def _of_split(split: Mapping[str, float], draw: float) -> str:
    total = 0.0
    for label, share in split.items():
        total += share
        if draw < total:
            return label
    return label  # of rounding: the shares sum to 1


def _number_of(key: str) -> float:
    """Return a number in [0, 1) that depends on a key only."""
    return float(hash_strings([key])[0]) / 2**64


def settings_of(body: bytes, before: Settings) -> Settings:
    """Read settings from JSON; those that are not given stay as before."""
    given = _given.decode(body)
    latest = before.latest if given.latest is None else given.latest
    versions = None if given.latest is not None else before.versions
    if given.versions is not None:
        versions = "all" if given.versions == "all" else tuple(given.versions)
    return Settings(
        latest=latest,
        versions=versions,
        labels=before.labels if given.labels is None else given.labels,
        split=before.split if given.split is None else given.split,
    )


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a change: `Settings` that may be left out."""

    latest: int | None = None
    versions: list[int] | Literal["all"] | None = None
    labels: dict[str, int] | None = None
    split: dict[str, float] | None = None


_given = json_decoder(_Given)
