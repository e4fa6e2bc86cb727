"""One module a table; `python -m benchmarks.NAME` runs one, `python -m benchmarks` all.

A module belongs to the tables if its name does not begin with an underscore and it has a `main()` that takes --device.
It checks what it measures before it measures it, and writes benchmarks/results/NAME-DEVICE.json. A new table is a new
file.
"""
