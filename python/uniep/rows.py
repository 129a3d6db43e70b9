"""How rows of experts lie: each expert's from a multiple of ROW_ALIGNMENT on."""

ROW_ALIGNMENT = 128  # as src/model/row_table.h has it


def padded(rows: int) -> int:
    """Rows of an expert with what lies empty behind them."""
    return -(-rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
