import threading
from collections.abc import Iterator

import pytest
import torch

from accelmark.frameworks.pytorch.batches import Ahead, mover, steps_of


def batches(count: int) -> Iterator[dict[str, torch.Tensor]]:
    return ({"x": torch.tensor([number])} for number in range(count))


def test_batches_are_grouped_by_step_and_leftovers_dropped() -> None:
    steps = list(steps_of(batches(7), 3))
    assert [[int(batch["x"]) for batch in step] for step in steps] == [[0, 1, 2], [3, 4, 5]]


def test_images_are_moved_in_channels_last_order() -> None:
    move = mover(torch.device("cpu"), channels_last=True)
    moved = move({"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2)})
    assert moved["image"].is_contiguous(memory_format=torch.channels_last)
    assert moved["label"].is_contiguous()


def test_items_fetched_ahead_come_in_order_and_end() -> None:
    ahead = Ahead(iter(range(20)), depth=2)
    assert list(ahead) == list(range(20))
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_a_background_error_is_raised_where_it_is_awaited() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("disk gone")

    ahead = Ahead(broken(), depth=2)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="disk gone"):
        next(ahead)


def test_a_feed_closed_early_leaves_no_thread() -> None:
    before = threading.active_count()
    ahead = Ahead(iter(range(1000)), depth=2)
    assert next(ahead) == 0
    ahead.close()
    assert threading.active_count() == before
