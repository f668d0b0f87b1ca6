'use strict';
// The page of a run polls its progress while a process works on it. All texts are text nodes.
{
    const INTERVAL = 2000; // milliseconds
    const page = document.querySelector('[data-fleet-progress]');

    const part = name => page.querySelector(`[data-fleet="${name}"]`);

    function show(progress) {
        const state = part('state');
        state.textContent = progress.state;
        state.className = `fleet-state ${progress.state.replaceAll(' ', '-')}`;
        for (const [state, count] of Object.entries(progress.counts)) {
            const element = part(`count-${state}`);
            if (element !== null) {
                element.textContent = count;
            }
        }
        for (const element of page.querySelectorAll('[data-fleet^="count-"]')) {
            if (!(element.dataset.fleet.slice('count-'.length) in progress.counts)) {
                element.textContent = 0;
            }
        }
        const busy = progress.busy.length ? progress.busy : ['nothing'];
        part('busy').replaceChildren(...busy.map(text => {
            const item = document.createElement('li');
            item.textContent = text;
            return item;
        }));
        const bar = part('percent');
        if (bar === null) {
            // The run has no steps, or had none when the page was rendered.
            if (progress.total) {
                window.location.reload();
            }
            return;
        }
        bar.value = progress.percent;
        part('ended').textContent = progress.ended;
        part('total').textContent = progress.total;
    }

    async function follow() {
        // A hidden page need not be up to date.
        if (!document.hidden) {
            try {
                const answer = await fetch(page.dataset.fleetProgress, {credentials: 'same-origin'});
                if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
                    // The session has ended, or the run is gone: the page redirects to the login, or says so.
                    window.location.reload();
                    return;
                }
                const progress = await answer.json();
                show(progress);
                if (!progress.live) {
                    // The run is over: the reloaded page says more.
                    window.location.reload();
                    return;
                }
            } catch (error) {
                // The site, or its database, does not answer; try again in two seconds.
            }
        }
        setTimeout(follow, INTERVAL);
    }

    if (page !== null) {
        setTimeout(follow, INTERVAL);
    }
}
