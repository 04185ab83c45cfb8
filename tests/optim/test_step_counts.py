"""Step counts equal torch's: dtype and device in ``state_dict``, for any default dtype."""

from __future__ import annotations

import pytest
import torch

import flatout.optim as fo
from tests.optim.helpers import assert_same, parameters, set_grads

OPTIONS = [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}]


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default_dtype", [torch.float64, torch.float32, torch.float16], indirect=True, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_the_dtype_of_step_is_torchs(name, options, default_dtype):
    theirs, ours = parameters(torch.float32), parameters(torch.float32)
    reference, optimizer = (getattr(m, name)(ps, **options) for m, ps in ((torch.optim, theirs), (fo, ours)))
    for step in range(3):
        set_grads(theirs, step), set_grads(ours, step)
        reference.step(), optimizer.step()
    assert_same(theirs, ours, torch.float32)
    for p, q in zip(ours, theirs, strict=True):
        assert optimizer.state[p]["step"].dtype == reference.state[q]["step"].dtype
    expected, saved = reference.state_dict()["state"], optimizer.state_dict()["state"]
    for i, entry in expected.items():
        torch.testing.assert_close(saved[i]["step"], entry["step"], rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.int64, torch.float64)], ids=str)
def test_counts_of_several_dtypes_count_on(dtypes):
    """One bucket may hold counts of both dtypes. float64 can count beyond the limit of float32."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in dtypes]
    optimizer = fo.AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for entry, dtype in zip(saved["state"].values(), dtypes, strict=True):
        entry["step"] = torch.tensor(2**24, dtype=dtype)
    optimizer.load_state_dict(saved)
    optimizer.step()
    for p, dtype in zip(params, dtypes, strict=True):
        step = optimizer.state[p]["step"]
        assert step.dtype == (dtype if dtype.is_floating_point else torch.float32)
        assert step == 2**24 + (dtype == torch.float64)
