// The numbers that Python and the library have for dtypes of activations: FORMATS in __init__.py.
#pragma once

enum Format { BFLOAT16, FLOAT16, FLOAT32 };
