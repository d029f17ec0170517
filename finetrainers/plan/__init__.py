"""Everything that is checked, decided and reported before a run trains."""
