"""Tasks: one tiny, safe file each; a folder of them; one base that becomes any of them in milliseconds."""
