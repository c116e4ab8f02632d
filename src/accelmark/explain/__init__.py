"""Explanations of settings, figures, audit rules and states, from the code and data that define them."""
