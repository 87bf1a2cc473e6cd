// KVANTA_INLINE: for what must disappear into its caller. In ISA units nothing may be emitted with external linkage: a
// linker would be free to keep the copy that another CPU cannot run.
#pragma once

#define KVANTA_INLINE inline __attribute__((always_inline))
