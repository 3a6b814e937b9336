// libattn.so is made of the static libraries of this folder; CMake wants a source of its own.
#include "attention/attn_engine.h"
