"""What every room may use: the machine, interrupts, read-ahead, plural forms, tables for notebooks."""
