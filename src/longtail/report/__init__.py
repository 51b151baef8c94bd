"""Reads run folders only: tables and plots."""
