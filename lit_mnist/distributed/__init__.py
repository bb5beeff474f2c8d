"""Ranks: their launcher, rendezvous, signals, failure reports, heartbeat, consensus and peer exchange."""
