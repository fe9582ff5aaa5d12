"""A run's dump of samples as one HTML page that opens from a file and asks no network.

    dump.py     lines of the dump ─▶ groups that are shown, with what is known of them elsewhere
    cells.py    a line ─▶ numbers for the columns, texts and tokens for a block
    build.py    columns and blocks ─▶ page.html with page.css and the *.js in it

In the page, numbers are gzip'd typed arrays, which filters read; texts lie in gzip'd blocks, of
which only those of the sample that is looked at are inflated.
"""
