"""Work of many short products takes one thread, which no other process can hold up."""

import pytest
import torch
from small import Observed
from threadpoolctl import threadpool_info

from nearkin.distributed import threads_for
from nearkin.distributed.devices import LITTLE
from nearkin.metrics.probe import fit_path


def test_little_work_takes_one_thread_of_every_library():
    def counts():
        return {pool["num_threads"] for pool in threadpool_info()}

    torch.set_num_threads(2)
    usual = counts()
    with threads_for(LITTLE):
        assert counts() == {1}
        assert torch.get_num_threads() == 1
    with threads_for(LITTLE + 1):
        assert counts() == usual
        assert torch.get_num_threads() == 2
    assert counts() == usual


@pytest.mark.parametrize(("dim", "threads"), [(8, 1), (LITTLE // 40 + 1, 2)])
def test_a_probe_of_few_values_multiplies_with_one_thread_and_of_many_with_all(dim, threads):
    torch.set_num_threads(2)
    seen = set()

    def note(operation, *_):
        if operation is torch.ops.aten.mm.default:
            seen.add(torch.get_num_threads())

    with Observed(note):
        fit_path(torch.randn(40, dim), torch.arange(40) % 3, 3, (1e-3,))
    assert seen == {threads}
