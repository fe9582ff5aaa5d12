from full_disk import no_file_beyond

from async_grpo.util.files import LineFile


def test_a_line_that_a_full_disk_takes_in_part_is_not_there_and_counted(tmp_path):
    said = []
    file = LineFile(tmp_path / "new" / "file", unit="samples", say=said.append)
    file.append(b"0123456\n")
    with no_file_beyond(20):
        file.append(b"8901234\n")
        for _ in range(3):
            file.append(b"6789\nfghij\n", number=2)
    assert file.path.read_bytes() == b"0123456\n8901234\n"
    file.append(b"end\n")
    assert file.path.read_bytes() == b"0123456\n8901234\nend\n"
    assert file.num_lost == 6
    assert said == [
        f"{file.path} cannot be written (File too large): the run goes on, and counts the samples "
        "that are missing from it"
    ]
