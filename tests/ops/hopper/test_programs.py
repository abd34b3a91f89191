from tests.ops.hopper import sanitize
from tests.ops.hopper.programs import program


def test_a_program_is_the_kernels_own_and_nothing_of_where_it_is_written():
    text = program(sanitize.CALLS["squared_relu_24"]())
    assert 'sym_name = "squared_relu_24_mosaic_gpu"' in text
    assert ".py" not in text and "loc(" not in text
    assert text != program(sanitize.CALLS["squared_relu_gradients"]())
