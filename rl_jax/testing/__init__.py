"""Fakes and tiny parts that ship with the product: for its own tests and for plugins' tests. Imports nothing here."""
