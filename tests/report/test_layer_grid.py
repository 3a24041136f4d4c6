"""Names as grids: every layer is in exactly one place, and its place gives its name back."""

from hypothesis import given
from hypothesis import strategies as st

from scrimp.report.layer_grid import ITSELF, MAX_COLUMNS, arrange, label_every, short_names

PART = st.sampled_from(["blocks", "layers", "0", "1", "07", "12", "mlp", "up", "down", "experts", "é"])
NAMES = st.lists(st.lists(PART, min_size=1, max_size=6).map(".".join), unique=True, max_size=60)


def placed(grids):
    return [layer for grid in grids for layer in grid.layers()]


@given(NAMES)
def test_every_layer_has_one_place_that_names_it(names):
    grids = arrange(names)
    assert sorted(placed(grids)) == sorted(names)
    for grid in grids:
        assert len(set(grid.columns)) == len(grid.columns) <= MAX_COLUMNS
        for row in grid.rows:
            assert len(row.layers) == len(grid.columns)
            for column, layer in zip(grid.columns, row.layers, strict=True):
                if grid.is_list:
                    assert layer == row.label
                elif layer is not None:
                    named = ".".join(part for part in (grid.prefix, row.label, column) if part)
                    assert named.replace("07", "7") == layer.replace("07", "7")


def test_odd_names_have_a_place():
    names = ["", "a.3.", "..", "3..x", "b.1.x", "b.01.x"]
    assert sorted(placed(arrange(names))) == sorted(names)
    assert arrange([""])[0].rows[0].label == ITSELF


def test_blocks_are_rows_in_the_order_of_their_numbers():
    (grid,) = arrange([f"model.layers.{n}.{name}" for n in (10, 2, 0) for name in ("mlp.up", "attn.q")])
    assert (grid.prefix, grid.columns) == ("model.layers", ("mlp.up", "attn.q"))
    assert [row.label for row in grid.rows] == ["0", "2", "10"]
    assert grid.row_title == "layer"
    assert grid.rows[2].layers == ("model.layers.10.mlp.up", "model.layers.10.attn.q")


def test_a_block_without_a_layer_has_a_gap():
    (grid,) = arrange(["b.0.q", "b.0.experts", "b.1.q"])
    assert grid.rows[1].layers == ("b.1.q", None)


def test_layers_without_a_number_are_a_list_at_the_end():
    grids = arrange(["head", "b.0.q", "net.2", "0"])
    assert [grid.is_list for grid in grids] == [False, True]
    assert [row.label for row in grids[1].rows] == ["head", "net.2", "0"]


def test_many_experts_become_rows_of_their_own():
    names = [f"blocks.{b}.experts.{e}.{n}" for b in range(2) for e in range(40) for n in ("up", "down")]
    names += [f"blocks.{b}.attention.qkv" for b in range(2)]
    grids = {grid.prefix: grid for grid in arrange(names)}
    assert set(grids) == {"blocks.0.experts", "blocks.1.experts", "blocks"}
    assert grids["blocks.1.experts"].row_title == "expert"
    assert grids["blocks.1.experts"].columns == ("up", "down")
    assert len(grids["blocks.1.experts"].rows) == 40


def test_too_many_kinds_of_layers_become_a_list():
    names = [f"b.0.kind{index}" for index in range(MAX_COLUMNS + 1)]
    (grid,) = arrange(names)
    assert grid.is_list
    assert placed([grid]) == names


def test_names_are_shortened_only_where_they_stay_different():
    assert short_names(["attn.q", "mlp.up"]) == ["q", "up"]
    assert short_names(["self.q", "cross.q"]) == ["self.q", "cross.q"]


def test_labels_never_come_closer_than_a_fiftieth():
    assert [label_every(rows) for rows in (1, 20, 21, 48, 80, 126, 1000)] == [1, 1, 4, 4, 5, 10, 20]
