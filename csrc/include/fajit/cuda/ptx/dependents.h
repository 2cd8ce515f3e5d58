// Programmatic dependent launch: a kernel that starts while the one before it ends (sm_90).
//
// One launch of a call may do so: its merge, which follows the attention kernels of the call. Meant
// to save the latency of that launch, an estimated 1 to 3 us of decoding with split keys, which has
// not been measured by itself.
//
// Why every value is that of launches in order:
//  * Before it waits, a merge writes nothing, and reads only its parameters and the plan. The plan
//    was copied to the device before the attention kernel started; no kernel writes it.
//  * wait_for_kernel_before() returns when all of that kernel has ended and its stores are visible,
//    whichever kernel it was, and whether or not it allowed anything. A kernel that another thread
//    enqueued between the two started after the attention kernel had ended.
//  * The next kernel is launched in order: it starts when the merge has ended. All threads of the
//    merge wait, those without a row too, so the attention kernel has ended by then. Thus the next
//    call may overwrite the partial states, and the next upload the plan.
//
// allow_kernel_after() is a hint, given when a block has only its last state to write; a block that
// ends without it allows as much. The merge starts when all blocks have allowed it, so none of
// attention is left to start, and its blocks take the place of none.
#pragma once
#include <fajit/cuda/ptx/device.h>

namespace fajit::ptx {

FAJIT_DEV void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

FAJIT_DEV void allow_kernel_after() { asm volatile("griddepcontrol.launch_dependents;"); }

}  // namespace fajit::ptx
