"""Ledgers: directories of verified results that any organisation can host in git."""
