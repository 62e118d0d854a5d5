"""A group without torch's default one, and parts of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from manyhands.collectives.backend.open import open_group
from manyhands.core.address import HubAddress
from manyhands.core.errors import LinkTimeout
from manyhands.links.hub import Hub


def test_groups_beside_the_default_one_and_parts_of_them():
    def member(where, rank):
        group = open_group(where, rank=rank, world=3, timeout_s=30)
        try:
            assert not dist.is_initialized()
            every = torch.tensor([1.0 + rank])
            group.allreduce([every]).wait()
            parts = []
            for ranks in ([0, 2], [1, 2], [0, 2]):
                part = group.part_of(ranks)
                assert (part is None) == (rank not in ranks)
                if part is None:
                    continue
                assert part.rank() == ranks.index(rank)
                tensor = torch.tensor([10.0**rank])
                part.allreduce([tensor]).wait()
                parts.append(float(tensor))
            return float(every), parts
        finally:
            group.shutdown()

    with Hub("127.0.0.1:0", insecure=True) as hub, ThreadPoolExecutor(3) as threads:
        address = HubAddress(host="127.0.0.1", port=hub.address.port, run="open", insecure=True)
        where = [address, f"{address}?insecure=1", address]
        found = list(threads.map(member, where, range(3)))
    assert found == [(6.0, [101.0, 101.0]), (6.0, [110.0]), (6.0, [101.0, 110.0, 101.0])]


def test_who_is_missing_is_named_in_time():
    with Hub("127.0.0.1:0", insecure=True) as hub:
        url = f"{hub.address}open?insecure=1"
        with pytest.raises(LinkTimeout, match="no rank 1 in run 'open'"):
            open_group(url, rank=0, world=2, timeout_s=60, meet_s=0.3)
