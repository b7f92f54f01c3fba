from rankzero.commands.jobs.check.user_script import UserScript


def words(text):
    """Returns the words of the last command of a script."""
    return [word.text for word in UserScript(text).commands[-1].words]


def test_a_variable_with_several_words_is_split():
    for assignments in (
        *('A="a b"', "A=(a b)", "A=(a)\nA+=(b)", 'A="a"\nA+=" b"', 'A=(a)\nA=("${A[@]}" b)', 'A=a\nA="$A b"'),
        *('B=b\nA="a $B"', "export A='a b'", 'A=""\nA+="a b"'),
    ):
        assert words(f"{assignments}\necho $A\n") == ["echo", "a", "b"]


def test_a_value_that_depends_on_the_run_is_unknown():
    for assignments in (
        *('if true; then A="a b"; fi', 'A="c d"\nif true; then A="a b"; fi', 'for i in 1; do A="a b"; done'),
        *('true && A="a b"', 'f() { A="a b"; }', 'A+="a b"'),
        'A="a b" env',  # holds for this program only
    ):
        assert words(f"{assignments}\necho $A\n") == ["echo", "$A"]


def test_elements_of_an_array_and_command_substitutions_are_words():
    assert words('A=(--x "a b" $B)\necho "${A[@]}"\n') == ["echo", "--x", "a b", "$B"]
    script = UserScript('A="--x $(hostname -f):1 y"\nsrun $A\n')
    assert [word.text for word in script.commands[-1].words] == ["srun", "--x", "$(hostname -f):1", "y"]
    assert [word.substituted for word in script.commands[-1].words] == [False, False, True, False]
