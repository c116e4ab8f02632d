"""Launch over SSH. Usable without a plan: ``connection`` runs commands on a host, and delivers AccelMark."""
