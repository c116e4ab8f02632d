# Sourced before the ranks start; what changes is recorded. Keep it to variables.
export @UPPER@_EXAMPLE=1
