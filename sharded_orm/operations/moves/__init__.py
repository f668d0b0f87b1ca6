"""Moves of shard keys from one shard to another."""
