"""Ratings with their sources, and topologies as the command takes them."""

import pytest

from maxmoe.planning.chips import CHIPS, GIB, parse_topology


@pytest.mark.parametrize("name", CHIPS)
def test_every_rating_has_a_source_and_a_sane_size(name):
    chip = CHIPS[name]
    ratings = chip.ratings()
    assert {"bf16_flops_per_s", "hbm_bytes", "hbm_bytes_per_s", "link_bytes_per_s"} <= set(ratings)
    for rating in ratings.values():
        assert len(rating.source) > 10
    assert 1e14 < ratings["bf16_flops_per_s"].value < 1e16
    assert 10 * GIB < ratings["hbm_bytes"].value < 300 * GIB
    assert 5e11 < ratings["hbm_bytes_per_s"].value < 1e13
    # What a program may use is what there is, to within what the compiler keeps or rounds.
    assert 0.95 < chip.usable_hbm_bytes / chip.per_device("hbm_bytes") < 1.01


def test_a_tpu7x_chip_is_two_devices_that_share_it():
    topology = parse_topology("tpu7x:4x4x2")
    assert (topology.num_chips, topology.num_devices, str(topology)) == (32, 64, "tpu7x:4x4x2")
    assert topology.chip.per_device("bf16_flops_per_s") == 2307e12 / 2
    assert topology.chip.send_bytes_per_s() == 1200e9 / 4  # of one device, in one direction


def test_gpus_send_faster_within_a_node():
    chip = parse_topology("h200:16").chip
    assert chip.send_bytes_per_s(across_nodes=False) == 450e9
    assert chip.send_bytes_per_s(across_nodes=True) == 50e9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("v4:2x2x1", "unknown chip 'v4'"),
        ("v5p", "3 sizes joined by x"),
        ("v5p:4x4", "3 sizes joined by x"),
        ("v6e:4x4x4", "2 sizes joined by x"),
        ("v6e:0x4", "2 sizes joined by x"),
        ("h200:2x4", "the number of GPUs"),
        ("h200:12", "give a multiple of 8"),
    ],
)
def test_parse_topology_says_what_is_allowed(text, says):
    with pytest.raises(ValueError, match=says) as raised:
        parse_topology(text)
    assert text in str(raised.value)
    assert "multiple" in says or "v6e:AxB" in str(raised.value)
