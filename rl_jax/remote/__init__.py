"""Servers in processes of their own: how they are started, spoken with and given weights, and what a death means."""
