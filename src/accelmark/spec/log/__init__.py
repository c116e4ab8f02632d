"""The events of a job with their codec, and the records of requests and hosts."""
