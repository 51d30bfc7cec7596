"""What is particular to each method, and the common tests cannot know."""

import torch
from small import BATCH, batch_at, small

from nearkin.objectives import info_nce, unit
from nearkin.types import UNKNOWN, Batch


def step(method, at=0):
    found = method.train()(batch_at(at, method.num_views), 0.5)
    found.loss.backward()
    with torch.no_grad():
        for parameter in method.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    return found


def test_moco_target_moves_by_its_momentum_after_the_step():
    method = small("moco", momentum=0.9)
    found = step(method)
    before = [p.clone() for p in method.target.parameters()]
    method.commit(found.memo, 0.5)
    for target, old, online in zip(method.target.parameters(), before, method.online.parameters()):
        torch.testing.assert_close(target, 0.9 * old + 0.1 * online)


def test_moco_keys_join_the_queue_after_their_loss_not_before():
    method = small("moco")
    found = step(method)
    assert not torch.isin(found.memo.keys, method.queue.keys).any()
    method.commit(found.memo, 0.5)
    torch.testing.assert_close(method.queue.keys[:BATCH], found.memo.keys)
    assert method.queue.index[:BATCH].tolist() == found.memo.images.tolist()
    assert (method.queue.index[BATCH:] == UNKNOWN).all()


def test_a_moco_query_never_meets_its_own_older_entry():
    method = small("moco").eval()
    batch = batch_at(0)
    method.commit(method(batch, 0.5).memo, 0.5)
    assert torch.isin(batch.index, method.queue.index).all()
    query, key = unit(method.online(batch.views[0])), unit(method.target(batch.views[1]))
    each = [
        info_nce(q[None], k[None], method.queue.keys[method.queue.index != i], 0.2)
        for q, k, i in zip(query, key, batch.index)
    ]
    torch.testing.assert_close(method(batch, 0.5).loss, torch.stack(each).mean())


def test_a_memory_bank_query_never_meets_its_own_row_among_its_negatives():
    method = small("moco_memory_bank", num_negatives=500).eval()
    batch = batch_at(0, 1)
    torch.manual_seed(0)
    loss = method(batch, 0.5).loss
    torch.manual_seed(0)
    drawn = method.bank.sample(500)
    query = unit(method.online(batch.views[0]))
    each = [
        info_nce(q[None], method.bank.keys[i][None], method.bank.keys[drawn[drawn != i]], 0.2)
        for q, i in zip(query, batch.index)
    ]
    assert (drawn[:, None] == batch.index).any()
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_end_to_end_keys_get_gradients_and_moco_keys_do_not():
    end_to_end = small("moco_end_to_end", key_encoder="separate")
    step(end_to_end)
    assert all(p.grad is not None for p in end_to_end.key_branch.parameters())
    moco = small("moco")
    step(moco)
    assert all(p.grad is None for p in moco.target.parameters())


def test_end_to_end_encoders_share_what_they_are_said_to_share():
    def shared(method):
        online = {p.data_ptr() for p in method.online.parameters()}
        keys = {p.data_ptr() for p in method.key_branch.parameters()}
        return len(online & keys), len(online)

    assert shared(small("moco_end_to_end", key_encoder="same")) == (6, 6)
    assert shared(small("moco_end_to_end", key_encoder="separate")) == (0, 6)
    assert shared(small("moco_end_to_end", key_encoder="shared_backbone")) == (2, 6)


def test_simclr_does_not_care_which_view_is_first():
    method = small("simclr").eval()
    batch = batch_at(0)
    swapped = Batch(batch.views[::-1], batch.index, batch.label)
    torch.testing.assert_close(method(swapped, 0.5).loss, method(batch, 0.5).loss)
