"""The table of passes: every pass of any program has a row, and the last one adds up."""

from __future__ import annotations

from step_account import Account, pass_table

from scrimp.planner.layout.step_account import Above, StepPass


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_pass_of_another_program_alone_has_a_row_and_all_of_them_add_up() -> None:
    ours = [
        Above(StepPass("products", 4, 2e9, 3e12, 5.0), StepPass("products", 0, 1e9, 3e12, 4.0)),
        Above(StepPass("loss", 1, 6e9, 0, 1.0), StepPass("loss", 0, 4e9, 0, 0.5)),
    ]
    theirs = {
        "LLMQ": {"products": StepPass("products", 0, 7e9, 0, 6.0)},
        "torchao": {"waits for the host": StepPass("waits for the host", seconds=2.0)},
    }
    heads, _, *rows = pass_table(Account(ours, {"products": 8, "loss": 2}, theirs), 6.0)
    assert cells(heads)[-4:] == ["LLMQ, GB", "LLMQ, s", "torchao, GB", "torchao, s"]
    found = {row[0]: row[1:] for row in map(cells, rows)}
    assert list(found) == ["products", "loss", "waits for the host", "all"]
    assert " ".join(found["products"]) == "8 2 1 3 5.00 4.00 +1.00 +16.7% 7 6.00 0 0.00"
    assert found["waits for the host"][-4:] == ["0", "0.00", "0", "2.00"]
    assert " ".join(found["all"]) == "10 8 5 3 6.00 4.50 +1.50 +25.0% 7 6.00 0 2.00"
