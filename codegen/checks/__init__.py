"""Static checks of a patched file against the tree that it was made from. Nothing is executed."""
