"""The docstrings of the public API: complete, with arguments and errors that exist."""

import builtins
import functools
import inspect
import re
import sys

import msgspec
import pytest

import kvactors
from kvactors import errors
from kvactors.cache import FromThread
from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.device.tensors import TensorDevice
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.from_thread import ThreadLease
from kvactors.layout.base import Layout
from kvactors.layout.latent import DSALayout, MLALayout
from kvactors.settings import Config
from kvactors.settings.sinks import AnySinkConfig
from kvactors.storage.backend import Backend

EXPORTED = tuple(getattr(kvactors, name) for name in kvactors.__all__)
EXTENSION_POINTS = (
    FromThread,
    ThreadLease,
    Sink,
    Backend,
    Layout,
    MLALayout,
    DSALayout,
    Device,
    HostDevice,
    TensorDevice,
)
TABLES = (*(type(default) for default in Config.__struct_defaults__), *AnySinkConfig.__args__)
CLASSES = tuple(
    dict.fromkeys(
        kind
        for kind in (*EXPORTED, *EXTENSION_POINTS, *TABLES, *vars(errors).values())
        if inspect.isclass(kind) and kind.__module__.startswith("kvactors")
    )
)
FUNCTIONS = tuple(thing for thing in EXPORTED if inspect.isfunction(thing))


def callables():
    """Every public function and method of the public API, with its owner."""
    for function in FUNCTIONS:
        yield pytest.param(None, function, id=function.__qualname__)
    for kind in CLASSES:
        for name, value in vars(kind).items():
            method = unwrapped(value)
            if not name.startswith("_") and inspect.isfunction(method):
                yield pytest.param(kind, method, id=f"{kind.__name__}.{name}")


def unwrapped(value):
    """The function behind a method, a class method, a static method or a property."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, functools.cached_property):
        return value.func
    return getattr(value, "__func__", value)


def named(text, parameter):
    """Whether a docstring describes a parameter: in a list of arguments, or quoted in a sentence."""
    listed = rf"^\s*(?:\w+, )*{parameter}(?:, \w+)*: "
    return bool(re.search(listed, text, re.MULTILINE) or f"`{parameter}`" in text)


def undescribed(owner, function):
    """Parameters of several that neither the docstring nor the class's or module's describes."""
    text = function.__doc__ or ""
    if re.match(r"See\b", text) or not text:
        return []
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    module = sys.modules[function.__module__]
    around = f"{module.__doc__}\n{owner and owner.__doc__}"
    return [
        name
        for name in names
        if len(names) > 1 and not named(text, name) and not named(around, name)
    ]


def raised(text):
    """Errors that the section `Raises` of a docstring names."""
    section = re.search(r"Raises:\n(.*?)(?:\n\s*\n|\Z)", inspect.cleandoc(text), re.DOTALL)
    return re.findall(r"^ {4}(\w+):", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.__name__) for kind in CLASSES])
def test_public_classes_have_docstrings_that_name_existing_errors(kind):
    assert "__doc__" in vars(kind)
    assert vars(kind)["__doc__"]
    assert not vars(kind)["__doc__"].startswith(f"{kind.__name__}(")  # made by a dataclass
    assert [name for name in raised(kind.__doc__) if not exists(name)] == []


@pytest.mark.parametrize(("owner", "function"), list(callables()))
def test_public_methods_describe_their_parameters_and_errors(owner, function):
    text = inspect.getdoc(function)  # of the base, for an override that has none
    assert text
    assert undescribed(owner, function) == []
    assert [name for name in raised(text) if not exists(name)] == []


@pytest.mark.parametrize("table", [pytest.param(kind, id=kind.__name__) for kind in TABLES])
def test_settings_are_described_by_attributes_that_exist(table):
    fields = {field.name for field in msgspec.structs.fields(table)}
    text = inspect.cleandoc(table.__doc__ or "")
    section = re.search(r"Attributes:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    entries = re.findall(r"^ {4}([\w, ]+): ", section[1], re.MULTILINE) if section else []
    described = {name for entry in entries for name in entry.split(", ")}
    assert described <= fields


def exists(name):
    """Whether an error is the package's or Python's."""
    return inspect.isclass(getattr(errors, name, None) or getattr(builtins, name, None))
