"""Checked types of everything that users write; imports no other package of AccelMark."""
