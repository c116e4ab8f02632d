"""Whether a result was fairly obtained: pure rules over what a run left behind, and one verdict from their findings."""
