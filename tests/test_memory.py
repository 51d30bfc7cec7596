"""Memories against a plain list, an example worked out by hand, and the laws of chance."""

from collections import deque

import pytest
import torch
from scipy.stats import chisquare

from nearkin.memory import EMPTY, MemoryBank, Queue, same_image_mask
from nearkin.objectives import unit
from nearkin.types import UNLABELED


def visits(start, count, dim=3):
    """Keys that say in their numbers which image they show."""
    index = torch.arange(start, start + count)
    return index[:, None].expand(count, dim).float(), index


def oldest_first(queue):
    return torch.arange(len(queue.keys)).roll(-int(queue.cursor))


def test_a_new_queue_is_full_of_unit_vectors_of_no_image():
    queue = Queue(size=50, dim=8)
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(50))
    assert queue.index.tolist() == [EMPTY] * 50
    assert not same_image_mask(torch.arange(50), queue.index).any()
    # They point in all directions alike: over the sphere in 128 dimensions E exp(q.k / .07) is
    # 0F1(64; 1 / (4 x .07^2)) = 2.208652.
    queue = Queue(size=65_536, dim=128)
    query = unit(torch.randn(16, 128))
    mean = (query @ queue.keys.T / 0.07).exp().mean().item()
    assert mean == pytest.approx(2.208652, rel=0.01)


@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_a_queue_is_a_list_that_forgets_its_oldest(size):
    """Whatever the batches; and a random key is replaced by each of the first, and by no other."""
    queue, expected, start = Queue(size, dim=3), deque([EMPTY] * size, maxlen=size), 0
    random = queue.keys.clone()
    for count in [1, 3, 0, 1, 7, 2, 20, 0, 5, 5, 5, 8, 1, 15, 14]:
        queue.enqueue(*visits(start, count))
        expected.extend(range(start, start + count))
        start += count
        order = oldest_first(queue)
        keys, index = queue.keys[order], queue.index[order]
        assert index.tolist() == list(expected)
        known = index != EMPTY
        assert torch.equal(keys[known], index[known, None].expand(-1, 3).float())
        assert queue.filled.tolist() == [place < start for place in range(size)]
        assert torch.equal(queue.keys[start:], random[start:])


@pytest.mark.parametrize("batch", [1, 3, 12])
def test_a_class_stays_with_its_key(batch):
    """Also where there are more keys than places, of which the last stay."""
    queue = Queue(5, dim=3, labeled=True)
    assert queue.label.tolist() == [UNLABELED] * 5
    for start in range(0, 4 * batch, batch):
        keys, index = visits(start, batch)
        queue.enqueue(keys, index, index % 11)
        known = queue.filled
        assert torch.equal(queue.label[known], queue.index[known] % 11)
        assert (queue.label[~known] == UNLABELED).all()
    newest = queue.index[oldest_first(queue)][-1]
    assert newest == 4 * batch - 1
    assert Queue(5, dim=3).label.numel() == 0


def test_keys_without_a_class_do_not_take_that_of_the_keys_before_them():
    queue = Queue(4, dim=3, labeled=True)
    queue.enqueue(*visits(0, 4), torch.arange(4))
    queue.enqueue(*visits(8, 2))
    assert queue.index.tolist() == [8, 9, 2, 3]
    assert queue.label.tolist() == [UNLABELED, UNLABELED, 2, 3]


def refused(memory, write, message):
    """A write that is refused, and of which nothing is written."""
    before = {name: value.clone() for name, value in memory.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        write()
    assert all(torch.equal(value, before[name]) for name, value in memory.state_dict().items())


def test_what_does_not_fit_a_memory_is_refused_before_anything_is_written():
    queue, bank = Queue(4, dim=3), MemoryBank(4, 3, momentum=0.5)
    keys, index = visits(0, 2)
    numbers = keys.numpy()
    refused(queue, lambda: queue.enqueue(keys, index, index), "the queue is not labeled=True")
    refused(queue, lambda: queue.enqueue(numbers, index), "keys is of type ndarray, expected a")
    refused(queue, lambda: queue.enqueue(keys, index.numpy()), "index is of type ndarray")
    refused(queue, lambda: queue.enqueue(keys, None), "index is of type NoneType")
    refused(bank, lambda: bank.write([0, 1], keys), "write: index is of type list, expected a")
    refused(bank, lambda: bank.write(index, numbers), "write: keys is of type ndarray")
    refused(bank, lambda: bank.write(index, keys[:, :2]), r"keys have shape \(2, 2\), the memory")


def test_images_and_classes_may_be_integers_of_any_size():
    queue, (keys, index) = Queue(4, dim=3, labeled=True), visits(5, 2)
    queue.enqueue(keys, index.int(), index.short())
    assert queue.index.tolist() == [5, 6, EMPTY, EMPTY]
    assert queue.label.tolist() == [5, 6, UNLABELED, UNLABELED]


def test_a_queue_copies_its_keys_without_their_graph():
    queue = Queue(4, dim=3)
    keys, index = visits(5, 2)
    queue.enqueue(keys.clone().requires_grad_(), index)
    assert not queue.keys.requires_grad
    queue.enqueue(keys, index)
    keys.zero_()
    index.zero_()
    assert queue.index.tolist() == [5, 6, 5, 6]
    assert torch.equal(queue.keys[2:], visits(5, 2)[0])


@pytest.mark.parametrize(("done", "labeled"), [(0, True), (3, False), (7, True)])
def test_a_restored_queue_goes_on_as_if_nothing_had_happened(done, labeled):
    def enqueue(queue, start):
        keys, index = visits(start, 1)
        queue.enqueue(keys, index, index % 7 if labeled else None)

    straight, restored = (Queue(5, dim=3, labeled=labeled) for _ in range(2))
    for start in range(done):
        enqueue(straight, start)
    restored.load_state_dict(straight.state_dict())
    assert set(straight.state_dict()) == {"keys", "index", "label", "cursor"}
    for start in range(done, done + 7):
        for queue in (straight, restored):
            enqueue(queue, start)
    assert all(map(torch.equal, straight.state_dict().values(), restored.state_dict().values()))


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.9, 1.0])
def test_a_bank_keeps_as_much_of_a_key_as_its_momentum_says(momentum):
    """And the keys of images that were not visited, to the bit."""
    bank, keys = MemoryBank(6, 4, momentum), unit(torch.randn(3, 4))
    before = bank.keys.clone()
    bank.write(torch.tensor([4, 0, 3]), keys)
    moved = momentum * before[[4, 0, 3]] + (1 - momentum) * keys
    torch.testing.assert_close(bank.keys[[4, 0, 3]], moved / moved.norm(dim=1, keepdim=True))
    assert torch.equal(bank.keys[[1, 2, 5]], before[[1, 2, 5]])
    assert set(bank.state_dict()) == {"keys"}


def test_a_bank_stays_on_the_sphere():
    bank = MemoryBank(8, 4, momentum=0.5)
    for step in range(100):
        index = torch.randperm(8)[:3]
        bank.write(index, unit(torch.randn(3, 4)) if step % 2 else -bank.keys[index] * 0.9)
    torch.testing.assert_close(bank.keys.norm(dim=1), torch.ones(8))


def test_draws_from_a_bank_are_even_do_not_depend_on_each_other_and_follow_torchs_seed():
    first, second = MemoryBank(5, 2, momentum=0.5).sample(20_000).view(2, -1)
    counts = torch.bincount(5 * first + second, minlength=25)
    assert len(counts) == 25
    assert chisquare(counts).pvalue > 0.001
    bank = MemoryBank(50, 2, momentum=0.5)
    draws = [torch.manual_seed(seed) and bank.sample(10) for seed in (3, 3, 4)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
