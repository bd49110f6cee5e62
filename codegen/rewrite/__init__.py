"""One rewrite of a file: planned edits carried out on LibCST's tree, in the file's own style."""
