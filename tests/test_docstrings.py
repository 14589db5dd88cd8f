"""Every public name says what it takes, what it refuses and where it is from."""

import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module

import pytest

import kvcompress
from kvcompress import budgets, profiles, pruners, public
from kvcompress.budgets import Budget
from kvcompress.caches.spec import BUDGETS, PRUNERS
from kvcompress.pruners import Pruner

MODULES = (kvcompress, *(import_module(f"kvcompress.{name}") for name in public.MODULES))


def public() -> Iterator[tuple[str, object]]:
    """Functions and classes that the modules offer, each once, under the first of its names."""
    seen = set()
    for module in MODULES:
        for name in module.__all__:
            found = getattr(module, name)
            if (inspect.isclass(found) or inspect.isfunction(found)) and found not in seen:
                seen.add(found)
                yield f"{module.__name__}.{name}", found


def methods(owner: type) -> Iterator[tuple[str, object]]:
    """Those of ours that users may call; what transformers has, it documents."""
    for name in dir(owner):
        found = inspect.getattr_static(owner, name)
        function = getattr(found, "__func__", getattr(found, "fget", found))
        ours = str(getattr(function, "__module__", "")).startswith("kvcompress")
        if not name.startswith("_") and inspect.isfunction(function) and ours:
            yield name, getattr(owner, name)


PUBLIC = dict(public())


def told(found: object) -> str:
    """What is said of a name: its docstring, and what its package says of all that are in it."""
    package = sys.modules[found.__module__.rpartition(".")[0]]
    return f"{inspect.getdoc(found)}\n{package.__doc__ if package is not kvcompress else ''}"


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_docstring_that_names_their_arguments(name):
    found = PUBLIC[name]
    assert inspect.getdoc(found), f"{name} has no docstring"
    said = told(found)
    missing = [x for x in inspect.signature(found).parameters if not re.search(rf"\b{x}\b", said)]
    assert not missing, f"{name} says nothing of {', '.join(missing)}"


@pytest.mark.parametrize("name", [name for name, found in PUBLIC.items() if inspect.isclass(found)])
def test_methods_of_public_classes_have_a_docstring(name):
    assert sorted(method for method, found in methods(PUBLIC[name]) if not inspect.getdoc(found)) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_what_raises_says_so(name):
    found = PUBLIC[name]
    body = found if inspect.isfunction(found) else vars(found).get("__post_init__", vars(found).get("__init__"))
    written = inspect.isfunction(body) and body.__code__.co_filename != "<string>"  # not made by dataclass
    if written and re.search(r"^\s+raise \w+Error", inspect.getsource(body), re.MULTILINE):
        assert re.search(r"\b[Rr]aises\b", told(found))


def offered(base: type, module: object) -> set[type]:
    """The classes of this kind that a module offers and that can be made."""
    found = (getattr(module, name) for name in module.__all__)
    return {x for x in found if inspect.isclass(x) and issubclass(x, base) and not inspect.isabstract(x)}


def test_pruners_and_budgets_are_known_by_name():
    assert offered(Pruner, pruners) == set(PRUNERS.values())
    assert offered(Budget, budgets) | offered(Budget, profiles) == set(BUDGETS.values())


def test_the_package_itself_names_what_most_people_take():
    assert len(kvcompress.__all__) <= 40
    assert len(offered(Pruner, kvcompress)) == 5
    assert offered(Budget, kvcompress) == offered(Budget, budgets)


@pytest.mark.parametrize("made", sorted(offered(Pruner, kvcompress), key=lambda made: made.__name__))
def test_pruners_name_their_source(made):
    assert re.search(r"Source: |by chance", inspect.getdoc(made))
