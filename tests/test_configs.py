"""Configs of converted models: every field is checked where a config is made or read, with its name and value."""

import json
from dataclasses import fields

import pytest
import torch

from kvcompress import ops
from kvcompress.dmc import DMCConfig
from kvcompress.pod import PoDConfig

LEAD = ((0, 0), (0, 1))
NONE_OF = {  # what no field of a kind may be
    int: ["3", 3.0, True, float("nan"), [3], -(2**31), 2**31, 2**32, 2**63, 10**400],
    float: ["0.5", True, float("nan"), float("inf"), -float("inf"), [0.5], 1e7, -1e7, 1e300, -(10**400), 1j],
    str: ["", "mean", 3, None, True, ["dmc"], {}],
}
OPTIONAL = ("window", "stride", "tau")


def kinds(config):
    """Fields of a config with what they may hold."""
    for field in fields(config):
        if field.name != "lead":
            value = getattr(config, field.name)
            yield field.name, int if field.name in ("window", "stride") else float if value is None else type(value)


WRONG = [
    (config, name, value)
    for config in (DMCConfig(), PoDConfig(LEAD))
    for name, kind in kinds(config)
    for value in NONE_OF[kind] + ([] if name in OPTIONAL else [None])
    if (name, value) != ("share_heads", "mean")
]


@pytest.mark.parametrize(("config", "name", "value"), WRONG, ids=[f"{name}-{value!r:.20}" for _, name, value in WRONG])
def test_a_wrong_field_is_named_with_its_value_when_made_and_when_read(config, name, value):
    for make in (lambda: type(config)(**{**vars(config), name: value}), lambda: read(config, name, value)):
        with pytest.raises(ValueError, match=rf"^{name} must be .*, got ") as error:
            make()
        assert len(str(error.value)) < 200
        assert not isinstance(value, str) or repr(value) in str(error.value)


def read(config, name, value):
    type(config).from_dict({**config.to_dict(), name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoDConfig(LEAD, recent=2**32), "recent must be at most 2147483647, got 4294967296"),
        (lambda: PoDConfig(LEAD, recent=0), "recent must be at least 1, got 0"),
        (lambda: PoDConfig(LEAD, 2**31 - 16, 16), r"sinks \+ recent must be at most 2147483647 tokens, got 2147483632"),
        (lambda: PoDConfig(LEAD, sinks=-1), "sinks must be at least 0, got -1"),
        (lambda: PoDConfig(LEAD, tau=1.5), "tau must be a number between 0 and 1, got 1.5"),
        (lambda: PoDConfig(LEAD, recent=-(10**400)), r"recent must be at least 1, got -2\*\*1328 or more"),
        (lambda: PoDConfig([[0, 0], [True, 1]]), r"lead\[1\]\[0\] must be a layer, got True"),
        (lambda: PoDConfig(None), "lead must be"),
        (lambda: DMCConfig(temperature=1e-320), "temperature must be a number between 1e-06 and 1000000.0, got 1e-320"),
        (lambda: DMCConfig(neuron=512), "neuron must be at most 511, got 512"),
        (lambda: DMCConfig(window=65), "window must be at most 64, got 65"),
        (lambda: DMCConfig(dms_window=2**31 - 1), "dms_window must be at most 2147483646, got 2147483647"),
        (lambda: DMCConfig(stride=0), "stride must be at least 1, got 0"),
        (lambda: DMCConfig(mode="dms", stride=4), "stride must be None with mode='dms', got 4"),
        (lambda: DMCConfig(mode="dms", window=4), "window must be None with mode='dms'"),
        (lambda: DMCConfig.from_dict(None), "config.kvcompress must be a dict, got None"),
        (lambda: PoDConfig.from_dict([1]), r"config.kvcompress must be a dict, got \[1\]"),
        (lambda: DMCConfig.from_dict({}), "config.kvcompress must be of the method dmc, got None"),
        (lambda: DMCConfig.from_dict({"method": "dmc", 3: 4}), "unknown fields 3"),
        (lambda: PoDConfig.from_dict({"method": "pod"}), "must have the field lead"),
    ],
)
def test_bounds_and_what_goes_together_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "config",
    [
        DMCConfig(shift=-3, temperature=1e-6, omega_eps=1e6, neuron=-256, window=64, stride=2**31 - 1),
        DMCConfig(mode="dms", dms_window=2**31 - 2, dms_scale=1e6, neuron_scale=1),
        PoDConfig(LEAD, 0, 2**31 - 1, 1e-320),
        PoDConfig(LEAD, 16, 1, 1, "cla"),
    ],
)
def test_the_largest_and_smallest_come_back_from_json(config):
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
@pytest.mark.parametrize("scale", [1e-6, 1e6, -1e6])
def test_decisions_are_numbers_at_all_bounds(temperature, scale):
    logits = torch.tensor([[[-3e38, -1e6, -1.0, 0.0, 1e-30, 5.0, 1e6, 3e38]]], requires_grad=True)
    for shift in (-1e6, 0.0, 1e6):
        found = ops.dmc_decisions(logits, temperature=temperature, scale=scale, shift=shift, margin=1e6)
        assert found.alpha.isfinite().all()
        (gradient,) = torch.autograd.grad(found.alpha.sum(), logits)
        assert gradient.isfinite().all()
