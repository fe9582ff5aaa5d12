"""A run's dump of samples as one HTML page that opens from a file and needs no network.

    dump.py     lines of the dump ─▶ groups to show, with facts of them from the run's other files
    cells.py    a line ─▶ numbers for the columns, texts and tokens for a block
    build.py    columns and blocks ─▶ page.html with page.css and the *.js in it

In the page, numbers are gzip'd typed arrays, which filters read. Texts are in gzip'd blocks: the
page inflates only the block of the sample that a reader looks at.
"""
