// Nothing of this header is needed; see ../algorithm.h.
#pragma once
